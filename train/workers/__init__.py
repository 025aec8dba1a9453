"""The SPMD workers, one class each.

Read ``role_groups`` (which groups of them a job has, and on which pool), ``resident_pools`` (pools that stay between
jobs), ``fewer_ranks`` (on which a run goes on where a machine has gone), then ``model_worker`` (what actor, critic and
scorer share: optimizer, a step, their part of a checkpoint), ``actor`` (the policy in training), ``rollout`` (fresh
responses, by vLLM with the weights in training), ``hf_rollout`` (the same by transformers), ``reference`` (the frozen
parent, which KL is measured to), ``critic`` (how good the state before each token is), ``reward`` (rewards of fresh
responses, on processes of their own), ``scorer`` (a reward model in training), ``disaggregated`` (actor and rollout
where generation has a pool of its own).
"""
