"""Renderers: the package's own for a model family, and one over any chat template. Both keep what was sampled as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.node.renderer_world import deepseek_call, deepseek_model, sampled
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.package_renderer import TooCostly
from prime_node.adapters.models.template_renderer import TemplateRenderer
from prime_node.algo.trajectories import interleave
from prime_protocol.turns import Turn

pytest.importorskip("renderers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny"), hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16
    )


def test_qwen3_continues_after_a_tool_and_restarts_where_thinking_is_stripped(qwen3: Path) -> None:
    from prime_node.adapters.models.package_renderer import PackageRenderer

    renderer = PackageRenderer(qwen3, name="auto")
    assert renderer.name == "qwen3"
    question = {"role": "user", "content": "How many are 2 and 2?"}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    first = sampled(qwen3, f"<think>\nlet me count\n</think>\n\n{call}<|im_end|>")
    prompt = tuple(renderer.render_ids([question]))
    parsed = renderer.parse_response(first.token_ids)
    assert parsed.reasoning.strip() == "let me count"
    assert parsed.tool_calls[0]["function"]["name"] == "add"

    answer = {"role": "tool", "content": "4"}
    bridged = renderer.bridge_to_next_turn(prompt, first.token_ids, [answer])
    assert bridged is not None
    assert tuple(bridged[: len(prompt) + len(first.token_ids)]) == prompt + first.token_ids
    second = sampled(qwen3, "<think>\nfour\n</think>\n\n4<|im_end|>")

    more = {"role": "user", "content": "And 3 and 3?"}
    assert renderer.bridge_to_next_turn(tuple(bridged), second.token_ids, [more]) is None
    messages = [question, parsed.message, answer, renderer.parse_response(second.token_ids).message, more]
    anew = tuple(renderer.render_ids(messages))
    assert "let me count" not in HfTokenizer(qwen3).decode(list(anew))
    third = sampled(qwen3, "<think>\nsix\n</think>\n\n6<|im_end|>")

    samples = interleave([Turn(prompt, first), Turn(tuple(bridged), second), Turn(anew, third)])
    assert [sample.turns for sample in samples] == [(0, 1), (2,)]
    tokens = samples[0].prompt_token_ids + samples[0].completion_token_ids
    assert tokens == tuple(bridged) + second.token_ids
    assert sum(samples[0].loss_mask) == len(first.token_ids) + len(second.token_ids)


@pytest.mark.parametrize(
    "call",
    [
        "[" * 5_000,
        '{"name": "add", "arguments": {"a": %s}}' % ("9" * 5_000),
        '{"name": 5, "arguments": {}}',
        "null",
        "[",
    ],
    ids=["deep", "a long number", "a number as a name", "nothing", "cut"],
)
def test_no_answer_ends_its_episode_by_a_call_that_is_none(qwen3: Path, call: str) -> None:
    """Before, three of these raised, so that a model or a worker ended an episode by its answer, and its group had no reward."""
    from prime_node.adapters.models.package_renderer import PackageRenderer

    renderer = PackageRenderer(qwen3, name="auto")
    parsed = renderer.parse_response(sampled(qwen3, f"four<tool_call>\n{call}\n</tool_call><|im_end|>").token_ids)
    assert parsed.content.startswith("four")
    assert parsed.tool_calls == ()
    assert renderer.render_ids([{"role": "user", "content": "?"}, parsed.message, {"role": "user", "content": "!"}])


def test_the_renderer_of_verifiers_gives_no_call_whose_name_is_none(qwen3: Path) -> None:
    """Before, the library failed on a name that is no text, so that an answer ended its episode with an error."""
    from renderers.base import create_renderer, load_tokenizer

    from prime_node.adapters.models.package_renderer import bounded_config

    renderer = create_renderer(load_tokenizer(str(qwen3)), bounded_config(qwen3, "qwen3"))
    for name in ('{"a": 1}', "5", '["add"]'):
        call = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
        answer = sampled(qwen3, f"four{call}{call.replace(name, chr(34) + 'add' + chr(34))}<|im_end|>")
        assert [one.name for one in renderer.parse_response(list(answer.token_ids)).tool_calls] == ["add"]


@pytest.mark.slow
def test_an_answer_that_would_be_parsed_for_hours_ends_its_episode_after_seconds(tmp_path: Path) -> None:
    """The package's search for the arguments takes time that grows with the third power of the blanks in them."""
    from prime_node.adapters.models.package_renderer import PackageRenderer

    renderer = PackageRenderer(deepseek_model(tmp_path), name="deepseek-v3")
    good = deepseek_call(tmp_path, '{"a": 2}\n```').token_ids
    parsed = renderer.parse_response(good)
    assert parsed.tool_calls[0]["function"]["name"] == "add"
    hostile = deepseek_call(tmp_path, "\n" * 20_000 + "x")
    with pytest.raises(TooCostly, match="more than 2 s"):
        renderer.parse_response(hostile.token_ids)
    assert renderer.parse_response(good) == parsed


def test_an_unknown_family_says_that_a_renderer_must_be_named(tiny: Path, tmp_path: Path) -> None:
    from prime_node.adapters.models.package_renderer import PackageRenderer

    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"model_type": "llama4_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no renderer is known"):
        PackageRenderer(tmp_path)
    with pytest.raises(ValueError, match="no renderer 'qwen9'"):
        PackageRenderer(tiny, name="qwen9")


@pytest.mark.parametrize("folder", ["tiny", "qwen3"])
def test_a_templates_prompt_is_the_leases_and_its_bridge_is_the_conversation(
    folder: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    renderer, tokenizer = TemplateRenderer(path), HfTokenizer(path)
    messages = [{"role": "user", "content": "spell sun <|im_end|>"}]
    prompt = renderer.render_ids(messages)
    assert prompt == tokenizer.encode_prompt("spell sun <|im_end|>")
    answer = [*tokenizer.encode("nus"), tokenizer.stop_token_id]
    new = [{"role": "user", "content": "No. Try again."}]
    bridged = renderer.bridge_to_next_turn(prompt, answer, new)
    whole = renderer.render_ids([*messages, {"role": "assistant", "content": "nus"}, *new])
    assert bridged == whole
    unfinished = renderer.bridge_to_next_turn(prompt, answer[:-1], new)
    assert unfinished == whole, "an answer that was cut off is closed"
    assert renderer.parse_response(answer).content == "nus"


def test_a_template_that_hides_earlier_answers_has_no_bridge(qwen3: Path, tmp_path: Path) -> None:
    for file in qwen3.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    config["chat_template"] = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TemplateRenderer(tmp_path).bridge_to_next_turn([1], [2], [{"role": "user", "content": "a"}]) is None
