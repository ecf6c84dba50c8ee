"""Who made a view: fingerprints that a model was trained with, against those of what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from haav.errors import ViewError

MadeBy = Mapping[str, Sequence[str]]
"""view → fingerprints of extractors whose views are accepted; a view that is left out, or has none, takes any"""


def check_made_by(accepted: MadeBy, given: Mapping[str, str], source: str, reader: str = "the model") -> None:
    """`given`: view → fingerprint of the extractor that made it; `source`: where it comes from, for the error"""
    for view, fingerprint in given.items():
        if accepted.get(view) and fingerprint not in accepted[view]:
            raise ViewError(
                f"{reader} was trained with another '{view}' than {source}.\n"
                f"  trained with  {' or '.join(accepted[view])}\n  given         {fingerprint}\n"
                "  Use the extractor, bridge and text database of its training photos. A packed model (haav pack)\n"
                "  brings the last two along; haav extract --model MODEL makes a store of the views that a model reads."
            )


def accepted_by_all(parts: Sequence[MadeBy]) -> dict[str, tuple[str, ...]]:
    """What several models that read the same views accept together"""
    together: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for view, fingerprints in part.items():
            if not fingerprints:
                continue
            known = together.get(view, tuple(fingerprints))
            shared = tuple(one for one in known if one in fingerprints)
            if not shared:
                raise ViewError(
                    f"these models were trained with different views by the name of '{view}':\n"
                    f"  one with      {' or '.join(known)}\n  another with  {' or '.join(fingerprints)}\n"
                    "  An ensemble looks at a photo once. Train its members on one store."
                )
            together[view] = shared
    return together
