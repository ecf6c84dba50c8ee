"""Provenance of views: compare the extractor fingerprints that a model was trained with to those of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from haav.errors import ViewError

MadeBy = Mapping[str, Sequence[str]]
"""view → fingerprints of accepted extractors; a view without an entry, or with an empty one, accepts any"""


def check_made_by(accepted: MadeBy, fingerprints: Mapping[str, str], source: str, reader: str = "the model") -> None:
    """Raise ViewError if a view was made by an extractor that is not accepted.

    `fingerprints` maps a view to the fingerprint of its extractor. `source` names its origin in the error.
    """
    for view, fingerprint in fingerprints.items():
        if accepted.get(view) and fingerprint not in accepted[view]:
            raise ViewError(
                f"{reader} was trained with another '{view}' than {source}.\n"
                f"  trained with  {' or '.join(accepted[view])}\n  given         {fingerprint}\n"
                "  Use the extractor, bridge and text database of its training photos. A packed model (haav pack)\n"
                "  brings the last two along; haav extract --model MODEL makes a store of the views that a model reads."
            )


def accepted_by_all(parts: Sequence[MadeBy]) -> dict[str, tuple[str, ...]]:
    """Fingerprints that all of several models accept, by view"""
    together: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for view, fingerprints in part.items():
            if not fingerprints:
                continue
            known = together.get(view, tuple(fingerprints))
            shared = tuple(fingerprint for fingerprint in known if fingerprint in fingerprints)
            if not shared:
                raise ViewError(
                    f"these models were trained with different views by the name of '{view}':\n"
                    f"  one with      {' or '.join(known)}\n  another with  {' or '.join(fingerprints)}\n"
                    "  An ensemble extracts each view once. Train its members on one store."
                )
            together[view] = shared
    return together
