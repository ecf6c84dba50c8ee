"""Whether views fit a model. Asked where views enter: `forward` checks nothing, so it never waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from haav.errors import ViewError, unknown
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.types import View, Views, ViewSpec


def check_views(model: Haav | Ensemble, views: Views) -> None:
    """Raises a ViewError that names the view and what is wrong with it. Cheap for views on the CPU."""
    specs = {name: member.encoding.embed.spec(name) for member in model.members for name in member.encoding.embed.names}
    if not views:
        raise ViewError(f"no view was given. This model reads {', '.join(specs)}; one of them is enough.")
    first, *_ = views
    for name, view in views.items():
        if name not in specs:
            raise ViewError(unknown("view", name, specs))
        _check_view(name, view, specs[name])
        if len(view.tokens) != len(views[first].tokens):
            raise ViewError(
                f"view '{name}' has {len(view.tokens)} photos, view '{first}' has {len(views[first].tokens)}."
            )


def _check_view(name: str, view: View, spec: ViewSpec) -> None:
    if view.tokens.dim() != 3 or view.tokens.shape[2] != spec.dim:
        raise ViewError(
            f"view '{name}' has shape {tuple(view.tokens.shape)}; this model takes (photos, tokens, {spec.dim})."
        )
    if view.mask.shape != view.tokens.shape[:2] or view.mask.dtype != torch.bool:
        raise ViewError(
            f"view '{name}' has a {view.mask.dtype} mask of shape {tuple(view.mask.shape)}; "
            f"it must be bool of shape {tuple(view.tokens.shape[:2])}, True where a token is real."
        )
    missing = [index for index in spec.indices if index not in view.indices]
    missing += ["boxes"] * (spec.boxes and view.boxes is None)
    if missing:
        raise ViewError(f"view '{name}' lacks {', '.join(missing)}: positions that this model was built with.")
    for index, size in spec.indices.items():
        _check_index(f"'{index}' of view '{name}'", view.indices[index], view.mask, size)
    if spec.boxes and view.boxes is not None and view.boxes.shape != (*view.mask.shape, 4):
        raise ViewError(f"boxes of view '{name}' have shape {tuple(view.boxes.shape)}, not (photos, tokens, 4).")


def _check_index(what: str, index: Tensor, mask: Tensor, size: int) -> None:
    if index.shape != mask.shape:
        raise ViewError(f"{what} has shape {tuple(index.shape)}; it must be {tuple(mask.shape)}, one number per token.")
    if bool(((index < 0) | (index >= size)).logical_and(mask).any()):
        raise ViewError(
            f"{what} goes from {int(index[mask].min())} to {int(index[mask].max())}; this model has 0 to {size - 1}."
        )
