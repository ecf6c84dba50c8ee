from __future__ import annotations

from collections.abc import Sequence

from haav.model.encodings.base import encodings
from haav.model.encodings.shared import SharedEncoding


@encodings.register("model_per_view")
class ModelPerViewEncoding(SharedEncoding):
    """A whole captioner for each view (paper §3.2), their word probabilities averaged.

    Each model is an ordinary one that happens to read a single view; `Ensemble` joins them.
    """

    keeps_views = False
    default_aggregator = "concat_tokens"

    @staticmethod
    def split(views: Sequence[str]) -> list[tuple[str, ...]]:
        return [(view,) for view in views]
