"""Sampling: parameters, noise, and the sampler."""

from rung.runner.sampler.noise import gumbel_noise
from rung.runner.sampler.params import SamplingParams
from rung.runner.sampler.sampler import Sampler

__all__ = ["Sampler", "SamplingParams", "gumbel_noise"]
