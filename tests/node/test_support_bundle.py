"""`prime-node support-bundle`: every kind of secret that a run has is planted in every file, and none is in the bundle."""

from __future__ import annotations

import base64
import tarfile
from pathlib import Path

import pytest
from tests.node.coordinator_world import COORDINATOR, ROOT, TRAINER, VALIDATOR
from tests.node.operator_world import make_run_folder, write_key
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.cli.run_dir import RunDir
from prime_node.cli.support_bundle import FILE_BYTES_MAX, without_secrets
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey

KEYS = {"coordinator": COORDINATOR, "trainer": TRAINER, "validator": VALIDATOR, "root": ROOT}
IDENTITY = SigningKey(bytes(range(32)))
SECRET = bytes(range(32, 64))
INVITATION = "eyJpbnZpdGF0aW9uIjogMX0"
TOKENS = {
    "WANDB_API_KEY": "wandb-0123456789abcdef",
    "HF_TOKEN": "hf_0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "aws-secret-0123456789",
    "PRIME_ENVIRONMENT_JUDGE": "judge-0123456789abcdef",
    "DATABASE_URL": "postgresql://prime:pass-word-of-the-database@db.example.org/run",
}


def lines_with_secrets() -> tuple[list[str], list[str]]:
    """Return lines as they may stand in a log, and the secrets in them, in the ways in which they may be written."""
    raw = [*(key.to_bytes() for key in KEYS.values()), IDENTITY.to_bytes(), SECRET]
    secrets = [form for one in raw for form in (one.hex(), one.hex().upper(), base64.b64encode(one).decode(),
                                                base64.urlsafe_b64encode(one).decode().rstrip("="))]  # fmt: skip
    secrets += [*TOKENS.values(), INVITATION, "unknown-token-0001", "unknown-pass-0002", "unknown-bearer-0003"]
    lines = [f"a secret stands here: {one}" for one in secrets[:-4]]
    lines += [
        f"join http://run.example.org:8400/#{'a' * 64}.{INVITATION}",
        f'worker.invite = "{INVITATION}"',
        "api_token=unknown-token-0001 and more",
        "connected to postgresql://prime:unknown-pass-0002@db.example.org/run",
        "Authorization: Bearer unknown-bearer-0003",
        "http://127.0.0.1:1/?token=unknown-token-0001",
    ]
    return lines, [*secrets, "pass-word-of-the-database"]


NAMED_SECRETS = {
    "a quoted string with blanks": 'password = "my long LEAK phrase"',
    "a quoted string with a comma": 'token = "abc,LEAK"',
    "an escaped quote": r'token = "abc\"LEAK"',
    "a string in a JSON string": r'{"message": "\"token\": \"abc LEAK\""}',
    "a list": 'hf_tokens = ["a", "LEAK"]',
    "a list of several lines": 'hf_tokens = [\n  "a]",\n  "LEAK",\n]',
    "an inline table": 'secrets = {a = "b", c = ["LEAK"]}',
    "a table": '[worker.secrets]\na = "b"\nc = [\n  ["LEAK"],\n]',
    "a dotted name": 'secrets.a = "LEAK"',
    "a JSON table": '{"secrets": {"a": {"b": 1}, "c": "LEAK"}}',
    "several words": "password: my long LEAK phrase",
    "a word after a string": "password = 'abc'LEAK",
    "basic authorization": "Authorization: Basic LEAK",
    "several cookies": "Cookie: sid=a; other=LEAK",
    "a key with hyphens": "x-api-key: sk-LEAK",
    "an access key": "access-key=LEAK",
    "a passphrase": "passphrase = my LEAK",
    "a short name": "db_pass=LEAK",
    "a private key": 'private_key = """\nabc\nLEAK\n"""',
    "a private key in PEM": "-----BEGIN EC PRIVATE KEY-----\nLEAK\n-----END EC PRIVATE KEY-----",
    "a slash in a URL": "https://user:p/LEAK@host.example.org",
    "an at sign in a URL": "https://user:p@LEAK@host.example.org",
}
"""Texts from which LEAK must be removed."""
WORD = "LEAKleak0LEAKleak1LEAKleak2"
FORMS = (
    *("--token %s", "--api-key %s --x", "--password 'a %s'", "['--token', '%s']", '["--token", "%s"]', "?auth=%s"),
    *(
        "pwd=%s",
        "Server=x;Uid=a;Pwd=%s;",
        "Authorization: Basic %s==",
        "('Authorization', 'Basic %s')",
        "{'authorization': 'Basic %s'}",
    ),
    *("npm_%s", "pypi-%s", "AIzaSy%s", "sk_live_%s", "rk_test_%s", "gsk_%s", "glpat-%s", "xoxb-123-456-%s", "xoxp-%s"),
    *("xapp-1-%s", "sk-ant-api03-%s", "ghs_%s", "dop_v1_%s", "bot123456789:%s", "hooks.slack.com/services/T0/B0/%s"),
    *(
        "eyJhbGciOiJIUzI1NiJ9.eyJ%s.abc",
        "AccountKey=%s==;",
        "sessionid=%s",
        "X-Amz-Signature=%s&a=b",
        "curl -u user:%s",
    ),
    *(
        "https://%s@host/x",
        "git+https://x-access-token:%s@github.com/a",
        "machine h login u password %s",
        "a key %s alone",
    ),
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n%s\n-----END PGP PRIVATE KEY BLOCK-----",
    "INFO a: -----BEGIN PRIVATE KEY-----\nINFO a: %s\nINFO a: -----END PRIVATE KEY-----",
)
"""Further texts, with WORD in the place of %s."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with all its keys, in whose files all secrets are written."""
    monkeypatch.setattr("prime_node.cli.support_bundle.HOME", tmp_path / "home")
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    place = RunDir(make_run_folder(tmp_path / "run"))
    for role, key in KEYS.items():
        write_key(place.key(role), key)
    write_key(tmp_path / "home" / "identity.key", IDENTITY)
    place.coordinator.mkdir()
    place.assignment_secret.write_bytes(SECRET)
    text = "\n".join(["policy 7 is published", *lines_with_secrets()[0], ""])
    for file in (
        place.config,
        place.overrides_file,
        place.log("coordinator"),
        place.trainer_metrics,
        place.path / "summary.json",
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return place


def bundle_of(run: RunDir, to: Path) -> dict[str, bytes]:
    ran = CliRunner().invoke(app, ["support-bundle", str(run.path), "--out", str(to)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    with tarfile.open(to) as archive:
        return {one.name: archive.extractfile(one).read() for one in archive.getmembers()}  # type: ignore[union-attr]


def test_no_secret_of_a_run_is_in_its_bundle(run: RunDir, tmp_path: Path) -> None:
    files = bundle_of(run, tmp_path / "out.tar.gz")
    planted = lines_with_secrets()[1]
    assert len(planted) > 30
    assert all(secret in run.log("coordinator").read_text() for secret in planted), "planted"
    found = [(name, secret) for name, data in files.items() for secret in planted if secret.encode() in data]
    assert found == []
    assert all(SECRET not in data and key.to_bytes() not in data for data in files.values() for key in KEYS.values())


def test_no_end_of_a_private_key_is_left_where_a_long_log_is_cut(run: RunDir, tmp_path: Path) -> None:
    """Before, the lines after the cut were kept, as no line said any more that a key began."""
    rest = "x" * (FILE_BYTES_MAX - 80) + "\n"
    key = f"-----BEGIN PRIVATE KEY-----\n{'LEAK' * 16}\n{'LEAK' * 3}\n-----END PRIVATE KEY-----\n"
    run.log("coordinator").write_text(key + rest)
    kept = bundle_of(run, tmp_path / "out.tar.gz")["support/logs/coordinator.log"].decode()
    assert kept == f"[removed]-----END PRIVATE KEY-----\n{rest}"


@pytest.mark.parametrize("name", ["token=", "Authorization: Bearer "])
def test_no_end_of_a_secret_is_left_where_a_long_log_is_cut(run: RunDir, tmp_path: Path, name: str) -> None:
    """Before, the name of a value was cut off, and no rule found what was left of the value."""
    line, end = f"{name}{'LEAK' * 9}\n", "LEAK" * 7 + "\n"
    rest = ("x" * 79 + "\n") * ((FILE_BYTES_MAX - len(end)) // 80)
    rest = "y" * (FILE_BYTES_MAX - len(end) - len(rest) - 1) + "\n" + rest
    run.log("coordinator").write_text(line + rest)
    kept = bundle_of(run, tmp_path / "out.tar.gz")["support/logs/coordinator.log"].decode()
    assert kept == rest


def test_tokens_of_services_and_long_passwords_are_found_without_a_name() -> None:
    """Before, a password of more than 300 characters stayed in its URL, and tokens stayed that no name introduced."""
    texts = [
        f"using {one}{'LEAK' * 9}" for one in ("hf_", "ghp_", "sk-", "AKIA", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.")
    ]
    texts += [f"at http://prime:{'LEAK' * 200}@proxy.example.org/", f"https://store.example.org/a?sig={'LEAK' * 9}"]
    assert [text for text in texts if "LEAK" in without_secrets(text, [])] == []
    envelope = '{"payload": "eyJ' + "a" * 99 + '"}'
    assert without_secrets(envelope, []) == envelope


def test_the_whole_value_after_the_name_of_a_secret_is_removed() -> None:
    after = "\n[next]\npolicy = 7"
    found = {name: without_secrets(text + after, []) for name, text in NAMED_SECRETS.items()}
    assert [name for name, text in found.items() if "LEAK" in text] == []
    assert [name for name, text in found.items() if not text.endswith(after)] == []


def test_secrets_of_many_services_and_forms_are_removed() -> None:
    """Before, 31 of 66 such texts kept theirs; of the same texts, detect-secrets 1.5.0 leaves 51."""
    texts = [form % WORD for form in FORMS] + [f"AWS {'LEAKleak0/' * 4}"]
    found = [without_secrets(text, []) for text in texts]
    assert [text for text in found if "LEAK" in text.upper()] == []


def test_what_is_no_secret_stays() -> None:
    kept = [
        f"policy {'0a' * 32} of 12D3KooWGjSE7eCu5f1Pa8pGxscmoEcdVx3hHqYJ3HoqQoQ2vdTg",
        '{"payload":"' + "eyJydW4iOiIz/ZTAxYWNm+OWY1" * 20 + '"}',
        "model Qwen/Qwen2.5-0.5B-Instruct in /home/User1/runs/Mine2, engine VllmEngine 0.32.0+cpu",
        "join LINK --set worker.threads=4 --batch-size 5",
        "Basic checks of the authors pass",
        'tokenizer = "qwen"',
        "passed: 3 of 4 tests",
        "http://run.example.org:8400/v1/status",
        "[token-server] begins",
    ]
    assert [text for text in kept if without_secrets(text, []) != text] == []
    row = without_secrets('{"tokens": 512, "password": "a", "reward_mean": 0.25}', [])
    assert '"reward_mean": 0.25}' in row


def test_a_bundle_holds_what_a_report_needs_and_no_file_of_keys(run: RunDir, tmp_path: Path) -> None:
    files = bundle_of(run, tmp_path / "out.tar.gz")
    assert b"policy 7 is published" in files["support/logs/coordinator.log"]
    assert {"support/run.json", "support/config.toml", "support/versions.json"} < set(files)
    assert not any("key" in name or "secret" in name for name in files)


def test_a_link_to_a_key_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    (run.path / "worker.log").symlink_to(run.key("root"))
    assert "support/worker.log" not in bundle_of(run, tmp_path / "out.tar.gz")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no logs and no settings"):
        CliRunner().invoke(app, ["support-bundle", str(tmp_path)], catch_exceptions=False)
