"""Several models behind the same encode/init_cache/decode: word probabilities are averaged.

The paper's "model per view" is one of these; so is its ensemble of four on the test server.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from haav.errors import ConfigError
from haav.model.embed import absent
from haav.model.haav import Haav
from haav.types import Cache, Decoded, EnsembleCache, EnsembleEncoded, Views


class Ensemble(nn.Module):
    def __init__(self, models: Sequence[Haav | Ensemble]) -> None:
        super().__init__()
        self.models = nn.ModuleList(member for model in models for member in model.members)
        sizes = {member.decoder.output.out_features for member in self.members}
        if len(sizes) != 1:
            raise ConfigError(f"an ensemble needs one vocabulary; these models know {sorted(sizes)} words.")

    @property
    def members(self) -> tuple[Haav, ...]:
        """The models that are trained each for itself."""
        return tuple(model for model in self.models if isinstance(model, Haav))

    def encode(self, views: Views) -> EnsembleEncoded:
        """Each member reads the views it knows; one that can see nothing of a photo has no say in it."""
        encoded = [member.encode(own_views(member, views)) for member in self.members]
        sees = torch.stack([part.present.any(dim=1) for part in encoded], dim=1).float()
        return EnsembleEncoded(tuple(encoded), sees / sees.sum(dim=1, keepdim=True).clamp(min=1))

    def init_cache(self, encoded: EnsembleEncoded) -> EnsembleCache:
        caches = (member.init_cache(part) for member, part in zip(self.members, encoded.members, strict=True))
        return EnsembleCache(tuple(caches), encoded.shares)

    def decode(self, tokens: Tensor, cache: EnsembleCache, weighed: int | None = None) -> Decoded:
        """Views are weighed by each member for itself, so there are no weights, whatever `weighed` says."""
        decoded = [member.decode(tokens, past, 0) for member, past in zip(self.members, cache.members, strict=True)]
        logprobs = torch.stack([part.logprobs for part in decoded], dim=1)
        # log Σ share·p; a photo that nobody sees gets the plain mean instead of -inf.
        blind = (cache.shares.sum(dim=1, keepdim=True) == 0) / len(decoded)
        shares = (cache.shares + blind).log()[:, :, None, None, None]
        caches = [part.cache for part in decoded]
        assert all(isinstance(past, Cache) for past in caches)
        return Decoded(
            logits=(logprobs + shares).logsumexp(dim=1),
            weights=None,
            cache=EnsembleCache(tuple(past for past in caches if isinstance(past, Cache)), cache.shares),
        )

    def forward(self, views: Views, tokens: Tensor) -> Decoded:
        return self.decode(tokens, self.init_cache(self.encode(views)))


def own_views(member: Haav, views: Views) -> Views:
    """The views that the member reads; absent ones in their place when none of them was given."""
    embed = member.encoding.embed
    own = {name: view for name, view in views.items() if name in embed.names}
    if own or not views:
        return own
    like = next(iter(views.values())).tokens
    return {name: absent(embed.spec(name), len(like), like.device) for name in embed.names}
