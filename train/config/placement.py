"""Settings of where the workers of training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from feedback.settings_base import Section

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Of Ray's placement groups."""


class PoolConfig(Section):
    """Processes, one a rank, on devices of their own."""

    ranks: int | None = Field(None, ge=1, description="Processes; train.ranks if unset.")
    threads: int | None = Field(None, ge=1, description="CPU threads of each; train.threads_per_rank if unset.")
    gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs of each; if unset, one where the cluster has any, and for the reward's own pool where it has "
        "some left.",
    )
    strategy: Strategy = Field(
        "PACK", description="Ray's placement: PACK on few machines, SPREAD on many; STRICT_ is one, or all different."
    )


class PlacementConfig(Section):
    """Which workers share processes, and so devices; workers of one pool do."""

    pools: dict[str, PoolConfig] = Field({"all": PoolConfig()}, description="The pools, by name.")
    actor: str = Field("all", description="Pool of the policy in training.")
    critic: str | None = Field(None, description="Pool of the critic (ppo); the actor's if unset.")
    reference: str = Field("all", description="Pool of the frozen parent policy, which KL is measured to.")
    rollout: str = Field("all", description="Pool that generates. If it is not the actor's, weights are sent to it.")
    reward: str | None = Field(None, description="Pool that rewards fresh responses; the driver itself if unset.")

    @property
    def roles(self) -> dict[str, str]:
        """The pool of each role that has one."""
        roles = {"actor": self.actor, "reference": self.reference, "rollout": self.rollout}
        optional = {"critic": self.critic, "reward": self.reward}
        return roles | {role: pool for role, pool in optional.items() if pool is not None}

    @model_validator(mode="after")
    def _pools_are_used(self) -> PlacementConfig:
        for role, pool in self.roles.items():
            if pool not in self.pools:
                raise ValueError(
                    f"train.placement.{role}={pool} is not a pool; set it to one of train.placement.pools: "
                    f"{', '.join(self.pools)}"
                )
        if idle := set(self.pools) - set(self.roles.values()):
            raise ValueError(
                f"train.placement.pools has {', '.join(sorted(idle))}, and no role is on it; name it for one of actor, "
                "critic, reference, rollout, reward or take it out"
            )
        return self
