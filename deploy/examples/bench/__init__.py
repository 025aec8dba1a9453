"""What single parts do on this machine and this disk: rates, latencies, bytes.

Of the data plane and the server, by ``command`` (the command bench) on ``rows`` (like real ones): ``capture`` (the
journal in turns with its peers), ``peers`` (SQLite and the bare disk), ``storage`` (the lake, in turns with deltalake's
own writer), ``scoring`` (its rate as history grows), ``front_end`` (the cost of everything but the engine). Of
training: ``reshard`` (weight sync by plan against gathering), ``reshard_table`` (what it moves for well-known models),
``asynchronous`` (a run whose responses go on while it learns), ``vocabulary`` (log-probabilities by tiles against whole
logits), ``resident`` (memory and seconds of workers that stay between cycles), ``plan`` (what `millrace plan` predicts
against what training takes), ``tensor_parallel`` (training that shares layers against FSDP alone), ``traffic`` (what a
run's driver reads of a large lake).
"""
