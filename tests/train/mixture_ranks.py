"""Run by torchrun for test_mixture_sync.py: ranks that train and generate a small mixture of experts.

Arguments: the policy, ranks of an engine, a folder. With a folder that is there, what the engine generates as it has
loaded the policy. With another one, weights are changed, exported to the folder and sent to the engine: by the plan,
from the folder as a swap in place does, and gathered. Prints one JSON object from rank 0: way -> answers, each a list
of (token, log-probability).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from deploy.examples.bench.training.reshard import join_torchruns_ranks
from tests.train.reshard_ranks import Ranks, computed
from train.export.model_folder import export
from train.model.hf_io import held
from train.weight_sync.gather import gather
from train.workers.rollout import load_files

PROMPTS = [[5, 9, 17, 3], [40, 2, 8, 8, 60, 11, 7], [30]]


def changed(ranks: Ranks, seed: int) -> None:
    """Give every weight other values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed + torch.distributed.get_rank())
    with torch.no_grad():
        for _, parameter in held(ranks.model):
            local = parameter.to_local()  # type: ignore[attr-defined]
            scale = 0.3 if local.ndim > 1 else 1.0
            local.copy_(scale * torch.randn(local.shape, generator=generator))


def answers(ranks: Ranks) -> list[Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = ranks.llm.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], sampling, use_tqdm=False)
    found = []
    for output in outputs:
        (answer,) = output.outputs
        found.append([(token, at[token].logprob) for token, at in zip(answer.token_ids, answer.logprobs, strict=True)])
    return found


def main() -> None:
    torch.set_num_threads(1)
    join_torchruns_ranks()
    policy, folder = Path(sys.argv[1]), Path(sys.argv[3])
    ranks = Ranks(policy, int(sys.argv[2]), 1)
    found: dict[str, Any] = {"loaded": answers(ranks)}
    if not folder.exists():
        torch.distributed.barrier()
        changed(ranks, 1)
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        export(ranks.model, policy, folder)
        found["checked"] = sorted(ranks.weight_sync.run(checked_tensors=10**9))
        found["by the plan"] = answers(ranks)
        by_plan = computed(ranks.engine)
        changed(ranks, 2)
        ranks.weight_sync.run()
        found["others"] = answers(ranks)
        load_files(ranks.llm, folder)
        found["in place"] = answers(ranks)
        ranks.weight_sync.run()
        changed(ranks, 1)
        gather(ranks.model, ranks.llm)
        found["gathered"] = answers(ranks)
        found["alike"] = all(torch.equal(values, by_plan[name]) for name, values in computed(ranks.engine).items())
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
