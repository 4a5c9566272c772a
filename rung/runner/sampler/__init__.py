"""Sampling: parameters, what they do to logits, noise, log-probabilities, and the sampler."""

from rung.runner.sampler.defaults import sampling_defaults
from rung.runner.sampler.logprobs import StepLogprobs, TokenLogprobs
from rung.runner.sampler.noise import gumbel_noise
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler", "SamplingParams", "StepLogprobs", "TokenLogprobs", "gumbel_noise", "sampling_defaults"]
