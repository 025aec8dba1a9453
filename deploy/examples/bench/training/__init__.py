"""What training costs, and what it is compared with.

``reshard`` (weight sync by plan against gathering), ``reshard_table`` (what it moves for well-known models),
``asynchronous`` (a run whose responses go on while it learns), ``vocabulary`` (log-probabilities by tiles against whole
logits), ``resident`` (memory and seconds of workers that stay between cycles), ``plan`` (what `millrace plan` predicts
against what training takes), ``tensor_parallel`` (training that shares layers against FSDP alone), ``traffic`` (what a
run's driver reads of a large lake).
"""
