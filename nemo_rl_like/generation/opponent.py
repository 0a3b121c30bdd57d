"""`OpponentEngine`: samples of the reference, or of a mixture of it and the policy, decoded on the ranks that hold both."""

from __future__ import annotations

from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.generation.embedded import EmbeddedEngine
from nemo_rl_like.model.forward import MegatronModel
from nemo_rl_like.model.mixture import MixedDecoder
from nemo_rl_like.spec.engine import EngineSpec
from nemo_rl_like.spec.online import MixtureOpponent, OpponentSpec


class OpponentEngine(EmbeddedEngine):
    """An embedded engine on the reference; a mixture draws from both models, at the policy's weights of the moment.

    Args: `context` from the worker group; `reference_handle` and `policy_handle`, this rank's models; `engine` from the spec;
    `opponent` from the algorithm block.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        reference_handle: MegatronModel,
        policy_handle: MegatronModel,
        engine: EngineSpec,
        opponent: OpponentSpec,
    ) -> None:
        super().__init__(context, model_handle=reference_handle, engine=engine)
        if isinstance(opponent, MixtureOpponent):
            self._models = (reference_handle, policy_handle)
            self._sampler = MixedDecoder(policy_handle, reference_handle, opponent.share)
