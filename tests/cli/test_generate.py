from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from rung.models import find_quickstart
from tests.cli.conftest import CONTEXT, refused

Rung = Callable[..., Result]
SHORT = ("--max-tokens", 6)


def answers(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_all_modes_give_the_same_tokens(rung: Rung, model_folder: Path) -> None:
    ran = {}
    for mode in ("eager", "compiled", "piecewise", "full", "auto"):
        report = answers(rung("generate", model_folder, "hello", "a longer prompt.", *SHORT, "--mode", mode, "--json"))
        ran[mode] = [completion["token_ids"] for completion in report["completions"]]
        assert {name.partition(".")[0] for name in report["steps"]} <= {
            "eager": {"none"},
            "compiled": {"none"},
            "piecewise": {"piecewise"},
            "full": {"full"},
            "auto": {"full", "piecewise"},
        }[mode]
    assert all(tokens == ran["eager"] for tokens in ran.values())


def test_one_prompt_prints_its_text_alone(rung: Rung, model_folder: Path) -> None:
    text = answers(rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--json"))["completions"][0]["text"]
    assert rung("generate", model_folder, "hello", *SHORT, "--mode", "eager").stdout == text + "\n"


def test_several_prompts_are_labelled_in_order(rung: Rung, model_folder: Path) -> None:
    lines = rung("generate", model_folder, "hello", "you", *SHORT, "--mode", "eager").stdout.splitlines()
    assert [line[:5] for line in lines if line.startswith("[")] == ["[1/2]", "[2/2]"]


def test_summary_goes_to_the_error_stream(rung: Rung, model_folder: Path) -> None:
    result = rung("generate", model_folder, "hello", *SHORT, "--mode", "compiled")
    for phase in ("import", "load weights", "trace", "compile", "load artifacts", "first token"):
        assert phase in result.stderr
    assert "tokens/s" in result.stderr
    assert "tokens/s" not in result.stdout


def test_second_run_loads_instead_of_tracing(rung: Rung, model_folder: Path) -> None:
    counts = [answers(rung("generate", model_folder, "hello", *SHORT, "--mode", "compiled", "--json"))["counters"] for _ in range(2)]
    assert [count.get("dynamo_traces", 0) for count in counts] == [1, 0]
    assert counts[1]["plan_hits"] == 1


def test_prompt_file_is_one_prompt(rung: Rung, model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\nyou\n")
    report = answers(rung("generate", model_folder, "--prompt-file", file, *SHORT, "--mode", "eager", "--json"))
    assert [completion["prompt"] for completion in report["completions"]] == ["hello\nyou"]


def test_seed_repeats_a_sample(rung: Rung, model_folder: Path) -> None:
    sampled = [
        answers(rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--temperature", 2, "--seed", seed, "--json"))
        for seed in (5, 5, 6)
    ]
    first, again, other = (report["completions"][0]["token_ids"] for report in sampled)
    assert first == again != other


def test_no_prompt_is_a_usage_error(rung: Rung) -> None:
    result = rung("generate", "smollm2")
    assert result.exit_code == 2
    assert "no prompt" in result.stderr


def test_prompt_in_the_place_of_the_model_is_explained(rung: Rung) -> None:
    result = rung("generate", "What is this?")
    assert result.exit_code == 2
    assert "the first argument is the model" in result.stderr


def test_missing_weight_is_named(rung: Rung, model_folder: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model_folder / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight" in refused(rung("generate", model_folder, "hello"))


def test_prompt_longer_than_the_context_is_refused(rung: Rung, model_folder: Path) -> None:
    assert f"{CONTEXT + 4} tokens" in refused(rung("generate", model_folder, "a" * (CONTEXT + 4), "--mode", "eager"))


def test_cache_too_small_for_one_request_is_refused(rung: Rung, model_folder: Path) -> None:
    assert "num_blocks=2" in refused(rung("generate", model_folder, "a" * 100, "--num-blocks", 2, "--mode", "eager"))


def test_chat_without_a_template_is_refused(rung: Rung, model_folder: Path) -> None:
    assert "no chat template" in refused(rung("generate", model_folder, "hello", "--chat"))


def test_absent_device_is_refused(rung: Rung, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "sees no CUDA device" in refused(rung("generate", model_folder, "hello", "--device", "cuda"))


def test_bad_sampling_value_is_refused(rung: Rung, model_folder: Path) -> None:
    assert "top_p" in refused(rung("generate", model_folder, "hello", "--top-p", 2))


def test_the_model_s_own_settings_hold_and_options_override_them(rung: Rung, model_folder: Path) -> None:
    greedy = tokens(rung, model_folder)
    (model_folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 3.0, "top_k": 20}))
    sampled = tokens(rung, model_folder, "--seed", 5)
    assert sampled == tokens(rung, model_folder, "--seed", 5, "--temperature", 3, "--top-k", 20) != greedy
    assert tokens(rung, model_folder, "--temperature", 0) == greedy
    (model_folder / "generation_config.json").write_text(json.dumps({"temperature": 3.0}))  # without do_sample it says nothing
    assert tokens(rung, model_folder) == greedy


def tokens(rung: Rung, model_folder: Path, *options: object) -> list[int]:
    report = answers(rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--json", *options))
    found: list[int] = report["completions"][0]["token_ids"]
    return found


def test_logprobs_are_in_the_json(rung: Rung, model_folder: Path) -> None:
    report = answers(rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--json", "--logprobs", 2))
    completion = report["completions"][0]
    assert [one["token_id"] for one in completion["logprobs"]] == completion["token_ids"]
    assert all(one["top"][0] == [one["token_id"], one["logprob"]] and one["rank"] == 1 for one in completion["logprobs"])
    assert all(len(one["top"]) == 2 for one in completion["logprobs"])


def test_an_answer_follows_a_json_schema(rung: Rung, model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "integer"}))
    options = ("--max-tokens", 40, "--mode", "eager", "--json", "--temperature", 2, "--seed", 3)
    report = answers(rung("generate", model_folder, "hello", *options, "--json-schema", schema))
    completion = report["completions"][0]
    assert completion["finish_reason"] == "stop"
    assert isinstance(json.loads(completion["text"]), int)
    schema.write_text('{"type": "nope"}')
    assert "JSON schema" in refused(rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--json-schema", schema))


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--json-schema", b"{nope", "is no JSON"),
        ("--json-schema", b"", "is no JSON"),
        ("--json-schema", b'{"title": "\xff"}', "is no text in UTF-8"),
        ("--prompt-file", b"caf\xe9", "is no text in UTF-8"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_first(
    rung: Rung, tmp_path: Path, option: str, content: bytes, message: str
) -> None:
    file = tmp_path / "given"
    file.write_bytes(content)
    stderr = refused(rung("generate", "no/such/model", "hello", option, file))
    assert option in stderr
    assert message in stderr


def test_a_step_trace_that_cannot_be_written_is_refused_first(rung: Rung, tmp_path: Path) -> None:
    assert "--step-trace" in refused(rung("generate", "no/such/model", "hello", "--step-trace", tmp_path / "none" / "steps.jsonl"))


@pytest.mark.parametrize(("option", "value"), [("--min-p", 2), ("--repetition-penalty", 0), ("--min-tokens", 7), ("--logprobs", -1)])
def test_bad_sampling_options_are_named(rung: Rung, model_folder: Path, option: str, value: float) -> None:
    assert option[2:].replace("-", "_") in refused(rung("generate", model_folder, "hello", *SHORT, option, value))


@pytest.mark.slow
def test_smollm2_answers_three_prompts_together(rung: Rung) -> None:
    try:
        find_quickstart()
    except Exception as missing:
        pytest.skip(str(missing))
    prompts = ("What is the capital of France?", "Name three colors.", "What is 2 plus 2? Answer with one number.")
    report = answers(rung("generate", "smollm2", *prompts, "--max-tokens", 24, "--prefill-chunk", 16, "--json"))
    assert "Paris" in report["completions"][0]["text"]
    assert report["steps"]["full.best"] > 5
    assert any(name.startswith("piecewise.") for name in report["steps"])
    assert not any(name.startswith("none.") for name in report["steps"])


def test_quantised_model_with_an_fp8_cache(rung: Rung, model_folder: Path) -> None:
    report = answers(
        rung("generate", model_folder, "hello", *SHORT, "--mode", "eager", "--quantize", "fp8", "--kv-cache-dtype", "fp8", "--json")
    )
    assert len(report["completions"][0]["token_ids"]) == 6


def test_layers_that_cannot_be_quantised_are_named(rung: Rung, model_folder: Path) -> None:
    message = refused(rung("generate", model_folder, "hello", "--quantize", "fp8-group128"))
    assert "layers.0.attention.qkv_proj: in_features must be a multiple of 128 for 'group128', got 32" in message
