"""`rung generate`: answer prompts, all of them in one continuous batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any, Literal

import click

from rung.cli.command import CompilingCommand
from rung.cli.files import check_writable, read_json_text, read_text
from rung.cli.options import device_options, fp8_options, integers, resolve_device, resolve_dtype, sampling_options
from rung.cli.phases import Phases


@click.command(cls=CompilingCommand)
@click.argument("model", default="smollm2")
@click.argument("prompts", nargs=-1)
@click.option(
    "--prompt-file",
    "files",
    type=click.File(encoding="utf-8"),
    multiple=True,
    help="A file with one prompt; may be given several times, - reads the input.",
)
@click.option("--chat/--no-chat", default=None, help="Put the prompt into the model's chat template; default: if it has one.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="At most so many tokens a prompt.")
@sampling_options
@click.option(
    "--mode",
    type=click.Choice(("auto", "eager", "compiled", "piecewise", "full")),
    default="auto",
    show_default=True,
    help="How steps run; auto: full graphs for decodes, piecewise graphs for other steps.",
)
@click.option("--max-model-len", type=int, help="Context: tokens of a prompt and its answer; default: what is needed, at most the model's.")
@click.option("--prefill-chunk", type=int, help="At most so many prompt tokens of one request in a step.")
@click.option("--num-blocks", type=int, help="Blocks of the KV cache, 16 tokens each; default: as many as can be used.")
@click.option("--kv-cache-bytes", type=int, help="Memory for the KV cache; default: as much as can be used.")
@click.option("--capture-sizes", metavar="N,N,...", callback=integers, help="Sizes of the graphs; default: the ladder, or a few on a CPU.")
@click.option("--graph-memory-bytes", type=int, help="At most so much memory for graphs; the least valuable sizes are left out.")
@click.option("--step-trace", type=click.Path(dir_okay=False), help="Append a line for each step to this file, for `rung ladder`.")
@click.option("--attention", default="auto", show_default=True, help="Attention backend; `rung doctor` lists them.")
@click.option("--batch-invariant", is_flag=True, help="The same bits for a prompt alone and beside others; slower, and not in eager mode.")
@fp8_options
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[Any, ...],
    chat: bool | None,
    max_tokens: int,
    json_schema: IO[str] | None,
    mode: str,
    max_model_len: int | None,
    prefill_chunk: int | None,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    capture_sizes: tuple[int, ...] | None,
    graph_memory_bytes: int | None,
    step_trace: str | None,
    attention: str,
    batch_invariant: bool,
    quantize: str | None,
    kv_cache_dtype: Literal["auto", "fp8"],
    dtype: str,
    device: str,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer PROMPTS with MODEL (a GGUF file, a transformers folder, or smollm2).

    Text goes to the output, everything else to the error stream. Several prompts run together and are printed one after the other."""
    prompts += tuple(read_text(file, "--prompt-file").strip() for file in files)
    if not prompts:
        if Path(model).suffix not in ("", ".gguf") or " " in model:
            raise click.UsageError(f"the first argument is the model; to ask {model!r}, write: rung generate smollm2 {model!r}")
        raise click.UsageError("no prompt: write rung generate MODEL PROMPT..., or use --prompt-file")
    check_writable(step_trace, "--step-trace")
    schema = None if json_schema is None else read_json_text(json_schema, "--json-schema")
    phases = Phases()
    with phases("import"):
        from rung.cli import assembly
        from rung.cli.stream import JsonStream, TextStream
        from rung.cli.summary import Summary, print_summary
        from rung.runner import RunnerConfig, SamplingParams, build_engine

    asked = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(max_tokens=max_tokens, **asked)  # refused before weights are loaded
    place = resolve_device(device)
    with phases("load weights"):
        decoder = assembly.open_decoder(model, resolve_dtype(dtype, place), place, quantize=quantize)
    params = SamplingParams(max_tokens=max_tokens, **assembly.sampling(decoder, asked, schema))
    ids = [_encode(decoder, prompt, chat) for prompt in prompts]
    settings = assembly.runner_settings(mode, place) | _sizes(decoder, ids, max_tokens, max_model_len, place.type == "cuda")
    if capture_sizes is not None and settings["graphs"] != "none":
        settings["capture_sizes"] = capture_sizes
    config = RunnerConfig(
        **settings,
        kv_cache_bytes=kv_cache_bytes,
        num_blocks=num_blocks,
        long_prefill_chunk=prefill_chunk,
        attention_backend=attention,
        kv_cache_dtype=kv_cache_dtype,
        batch_invariant=batch_invariant,
        graph_memory_bytes=graph_memory_bytes,
        step_trace=step_trace,
    )
    engine, runner, start_up = build_engine(decoder.module, config, tokenizer=decoder.tokenizer)
    assembly.add_start_up(phases, start_up)

    stream = JsonStream() if as_json else TextStream(len(prompts), sys.stdout)
    start = time.perf_counter()
    for index, update in engine.stream(ids, params):
        if "first token" not in phases.seconds:
            phases.add("first token", time.perf_counter() - start)
        stream.add(index, update)
    seconds = time.perf_counter() - start
    summary = Summary(
        model=model,
        mode=mode,
        device=str(place),
        phases=phases.seconds,
        prompt_tokens=sum(len(one) for one in ids),
        generated_tokens=sum(len(completion.token_ids) for completion in stream.completions.values()),
        seconds=seconds,
        counts=runner.counters.snapshot(),
        graph_memory=assembly.graph_memory(runner),
        store="" if start_up.compile is None else str(start_up.compile),
        memory_plan=start_up.memory,
    )
    if as_json:
        completions = [stream.describe(index, prompt) for index, prompt in enumerate(prompts)]
        click.echo(json.dumps({**summary.as_json(), "completions": completions}))
    else:
        print_summary(summary)
        for index, completion in sorted(stream.completions.items()):
            if completion.error is not None:
                click.echo(f"prompt {index + 1} ended with an error: {completion.error}", err=True)


def _encode(decoder: Any, prompt: str, chat: bool | None) -> list[int]:
    from rung.errors import TokenizerError

    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise TokenizerError(f"{decoder.name} has no tokenizer, so it takes no text", hint="put the model's tokenizer.json into its folder")
    if chat or (chat is None and tokenizer.chat_template is not None):
        ids: list[int] = tokenizer.apply_chat([{"role": "user", "content": prompt}])
        return ids
    encoded: list[int] = tokenizer.encode(prompt)
    return encoded


def _sizes(decoder: Any, ids: list[list[int]], max_tokens: int, max_model_len: int | None, on_gpu: bool) -> dict[str, int]:
    """Slots and context for these prompts. A full graph reads as many keys as the context allows, so it is not larger than needed."""
    limit: int = decoder.config.max_position_embeddings
    needed = -(-(max(len(one) for one in ids) + max_tokens) // 16) * 16
    return {
        "max_num_requests": min(max(16, len(ids)), 512 if on_gpu else 16),
        "max_model_len": min(limit, needed) if max_model_len is None else min(limit, max_model_len),
    }
