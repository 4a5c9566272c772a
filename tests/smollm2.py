"""Prompts and the comparison of greedy tokens with a reference, for the tests on CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOPICS = (
    "Name three primary colours.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "Hi",
    "List five animals that live in the sea and say one thing about each of them.",
    "Translate 'good morning' to Spanish.",
    "What is 17 plus 25?",
    "Why is the sky blue? Answer in two sentences, please, and avoid technical words.",
    "Tell me a short story about a fox who could not find its way home in the dark forest.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "How do bees make honey?",
    "What does a compiler do? I know some Python but have never written one in my life.",
    "Describe the taste of coffee.",
    "Count from one to ten.",
    "What is the largest planet?",
    "Summarise: The cat sat on the mat. The dog barked at the cat. The cat ran away up the old tree behind the house.",
    "Suggest a name for a small bakery.",
    "What should I pack for a week in the mountains in early spring when it may still snow?",
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token where two greedy texts differ, and how close the reference's two best logits were there."""

    prompt: int
    position: int
    gap: float


def reference_tokens(model: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens, past any end token, and for each the distance of the two best logits."""
    ids = torch.tensor([list(prompt)], device=model.device)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    gaps = [float(best[0, 0] - best[0, 1]) for best in (step.float().topk(2).values for step in result.logits)]
    return result.sequences[0, len(prompt) :].tolist(), gaps


def divergences(ours: Sequence[Sequence[int]], reference: Sequence[tuple[list[int], list[float]]]) -> list[Divergence]:
    """One entry for each prompt whose tokens differ."""
    found = []
    for index, (mine, (theirs, gaps)) in enumerate(zip(ours, reference, strict=True)):
        assert len(mine) == len(theirs)
        first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if first is not None:
            found.append(Divergence(index, first, gaps[first]))
    return found
