"""CHAIR (Rohrbach et al. 2018): objects that a caption names although the photo has none of them.

An object counts as being there if the labels say so or if a person's caption names it. Words stand for the 80
classes of COCO; other labels stand for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from haav.evaluate.ngrams import Caption

_NAMES = """
person: man, men, woman, women, boy, girl, child, children, kid, baby, babies, guy, lady, ladies, people, toddler,
crowd, player, batter, catcher, pitcher, umpire, skier, surfer, snowboarder, skateboarder, rider, pedestrian, officer,
chef; bicycle: bike; car: taxi, cab, suv, jeep, minivan; motorcycle: motorbike, moped; bus: buses; train: locomotive,
tram; airplane: plane, aeroplane, jet, aircraft, airliner, jetliner; truck: pickup, lorry, firetruck; boat: ship,
sailboat, canoe, kayak; traffic light: stoplight, stop light; fire hydrant: hydrant; stop sign; parking meter; bench:
benches; bird: pigeon, seagull, duck, goose, geese, parrot, owl, swan; cat: kitten; dog: puppy, puppies; horse: pony;
sheep: lamb; cow: cattle, bull, calf; elephant: baby elephant; bear: polar bear; zebra; giraffe; backpack; umbrella:
parasol; handbag: purse; tie: necktie; suitcase: luggage; frisbee; skis: ski; snowboard; sports ball: ball, soccer
ball, tennis ball; kite; baseball bat: bat; baseball glove: mitt; skateboard; surfboard: surf board; tennis racket:
racket, racquet; bottle; wine glass; cup: mug; fork; knife: knives; spoon; bowl; banana; apple; sandwich: sandwiches,
burger, hamburger; orange; broccoli; carrot; hot dog: hotdog; pizza; donut: doughnut; cake: cupcake; chair: armchair,
stool; couch: couches, sofa; potted plant: pottedplant, houseplant; bed; dining table: diningtable, table, desk;
toilet: urinal; tv: tvmonitor, television; laptop; mouse; remote; keyboard; cell phone: phone, cellphone, smartphone;
microwave; oven: stove; toaster; sink; refrigerator: fridge; book; clock; vase; scissors; teddy bear: teddy; hair
drier: hairdryer; toothbrush: toothbrushes
"""
_NOTHING = ("toilet paper", "car seat", "train station", "train track", "bus stop", "bed room", "table cloth")
"""name no object of these classes, though their words do"""


def chair(
    captions: Sequence[Caption],
    labels: Sequence[Iterable[str]],
    references: Sequence[Sequence[Caption]],
) -> dict[str, float]:
    """CHAIRi: share of named objects that are not there; CHAIRs: share of captions that name one."""
    labels = [[label.strip().lower() for label in own] for own in labels]
    names = _names({label for own in labels for label in own})
    said = [mentioned(caption, names) for caption in captions]
    wrong = []
    for objects, own, texts in zip(said, labels, references, strict=True):
        there = {names[_singular(label, names)] for label in own} | {
            name for text in texts for name in mentioned(text, names)
        }
        wrong.append([name for name in objects if name not in there])
    return {
        "CHAIRi": sum(map(len, wrong)) / max(sum(map(len, said)), 1),
        "CHAIRs": sum(map(bool, wrong)) / max(len(captions), 1),
    }


def mentioned(caption: Caption, names: Mapping[str, str | None]) -> list[str]:
    """The classes of the objects that a caption names, in its order; two words that make one name go first."""
    found, at = [], 0
    while at < len(caption):
        for length in (2, 1):
            name = " ".join(caption[at : at + length])
            known = _singular(name, names)
            if known in names:
                break
        at += length
        if named := names.get(known):
            found.append(named)
    return found


def _singular(name: str, names: Mapping[str, str | None]) -> str:
    """The name itself if it is known, else without its plural's ending if that is"""
    forms = (name, name.removesuffix("s"), name.removesuffix("es"))
    return next((form for form in forms if names.get(form) or form in _NOTHING), name)


def class_names() -> dict[str, str | None]:
    """word or two words → class of COCO"""
    return _names(())


def _names(labels: Iterable[str]) -> dict[str, str | None]:
    """word or two words → class, None for what is no object"""
    names: dict[str, str | None] = dict.fromkeys(_NOTHING)
    for entry in " ".join(_NAMES.split()).split(";"):
        name, _, others = (part.strip() for part in entry.partition(":"))
        names |= dict.fromkeys((name, *(other.strip() for other in others.split(",") if other)), name)
    return {label: label for label in labels if _singular(label, names) not in names} | names
