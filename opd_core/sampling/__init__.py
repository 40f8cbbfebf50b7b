"""Engines that sample the student.

``protocol``            what an engine takes and gives
``transformers_engine`` in-process: continuous batching, exact rollout_logprobs
``slots``               keys and values of its rows, and the forward passes over them
``server_sampler``      servers as engines
"""
