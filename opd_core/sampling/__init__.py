"""Engines that sample the student.

``protocol``            what an engine takes and gives
``transformers_engine`` in-process generation with a KV cache and exact rollout_logprobs
"""
