"""What happened: interactions and feedback are recorded, kept and scored. Imports no torch, vLLM or Ray.

Read ``schema`` (the three tables), ``events`` (feedback as it comes in, validated, to a row) and ``redaction`` (removes
from texts what must not be kept), then follow a row: ``journal`` (durable on this machine), ``ingest`` (into the lake),
``lake`` (the Delta tables and how they are read), ``scoring`` (rewards), ``datasets`` (training data). ``exchange``
(sets of other tools, in and out), ``maintenance`` (compacts, retains and erases).

For all of them: ``config`` (settings of the journal, the lake, feedback and scoring), ``settings_base`` (the base of
every group of settings, here and elsewhere), ``files`` (the only place that writes atomically, fsyncs or locks),
``ids`` (time-ordered ids, UUID version 7), ``sampling_parameters`` (which distribution a response was sampled from),
``user_code`` (where the user's own modules are found), ``trusted_code`` (code that comes with a model, and the consent
to run it), ``tokenizers`` (of models' folders), ``processes`` (how they begin, end and reach each other).
"""

import logging

# What importing transformers says wherever torchao is: of kernels that a CPU can't load, and of how torchao registers
# its types with torch. Nobody can do anything about it, and this package is imported first.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
