"""Engines that sample the student.

``protocol``            what an engine takes and gives
``transformers_engine`` in-process: continuous batching, exact rollout_logprobs
``slots``               keys and values of its rows, and the forward passes over them
``server_sampler``      servers as engines; ``server_replicas``: which of them is asked
``server_wire``         requests and answers of SGLang and LMDeploy
``server_calls``        what else they are asked
``weight_paths``        how weights reach servers; ``samplers``: where they answer
"""
