"""Load, faults and benchmarks from outside: they speak HTTP and the command line, and import nothing of the product.

How many users a server holds: ``locustfile`` (simulated users, also by hand), ``capacity`` (``make loadtest``:
thresholds, a page, the soak).

For several of them: ``server`` (runs ``millrace``), ``vllm_peer`` (vLLM's own server, configured as ours),
``tiny_model`` (a random model that starts in seconds), ``event_lines`` (lines of a stream), ``closed_loop`` (HTTP
clients that cost next to nothing, for benchmarks), ``turns`` (training jobs that take turns), ``memory`` (what
processes that stay grow by),
``paired`` (ratios of alternating turns, with intervals).

What must hold: ``crash`` (kills servers and commands, counts what was lost), ``chaos_train`` (kills and stops
processes of trainings), ``fuzz`` (requests that nobody should
send), ``fuzz_valid`` (requests that the docs allow) with ``valid_requests`` (draws them) and ``valid_answers`` (what an
answer must be), ``thumbs`` (a person with nothing but thumbs), ``tour`` (the same in the console, with pictures),
``model_shapes`` (models of usual shapes on default settings), ``trl_round_trip`` (feedback to TRL and back) with
``trl_sets`` (TRL trains on it; needs ``requirements-trl.txt``), ``harnesses`` (lm-eval and Inspect on an endpoint and
on a policy's folder).

What is measured: ``bench_capture`` (the data plane), ``bench_console`` (what the console costs serving),
``bench_serve`` (against vLLM's own server), ``bench_start`` (how long both take to start), ``bench_swap`` (swaps under
streaming clients), ``bench_loop`` (from a thumb to the policy that learned from it) with ``letters`` (its users'
taste), ``bench_reshard`` (weight sync by plan against gathering), ``bench_train`` (GRPO steps against TRL's) with
``trl_grpo`` (TRL's side of it), ``bench_learn`` (samples and seconds to an accuracy against TRL's) with ``words`` (its
task), ``word_policy`` (what both start from), ``trl_words`` (TRL's side) and ``learning_curve`` (what either says as it
goes), ``bench_async`` (what responses that go on while training learns save) with
``countdown`` (a model whose responses differ in length), ``bench_traffic`` (what a run's driver reads of a large lake),
``bench_gpu`` (some of these on a machine with GPUs).
"""
