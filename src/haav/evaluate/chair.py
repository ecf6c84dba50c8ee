"""CHAIR (Rohrbach et al. 2018): hallucinated objects, which a caption names but the photo does not contain.

An object counts as present if the labels contain it or if a reference caption names it. Words are mapped to the 80
classes of COCO. Other labels are classes of their own.
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
"""phrases that name no object of these classes, although their words do"""


def chair(
    captions: Sequence[Caption],
    labels: Sequence[Iterable[str]],
    references: Sequence[Sequence[Caption]],
) -> dict[str, float]:
    """CHAIRi: share of named objects that are absent. CHAIRs: share of captions that name an absent object."""
    labels = [[label.strip().lower() for label in photo_labels] for photo_labels in labels]
    names = _names({label for photo_labels in labels for label in photo_labels})
    said = [mentioned(caption, names) for caption in captions]
    wrong = []
    for objects, photo_labels, texts in zip(said, labels, references, strict=True):
        there = {names[_singular(label, names)] for label in photo_labels} | {
            name for text in texts for name in mentioned(text, names)
        }
        wrong.append([name for name in objects if name not in there])
    return {
        "CHAIRi": sum(map(len, wrong)) / max(sum(map(len, said)), 1),
        "CHAIRs": sum(map(bool, wrong)) / max(len(captions), 1),
    }


def mentioned(caption: Caption, names: Mapping[str, str | None]) -> list[str]:
    """Classes of the objects that a caption names, in order. Names of two words take precedence."""
    classes, position = [], 0
    while position < len(caption):
        for length in (2, 1):
            name = " ".join(caption[position : position + length])
            known = _singular(name, names)
            if known in names:
                break
        position += length
        if named := names.get(known):
            classes.append(named)
    return classes


def _singular(name: str, names: Mapping[str, str | None]) -> str:
    """The name if it is known, otherwise its singular if that is known, otherwise the name"""
    forms = (name, name.removesuffix("s"), name.removesuffix("es"))
    return next((form for form in forms if names.get(form) or form in _NOTHING), name)


def class_names() -> dict[str, str | None]:
    """One or two words → class of COCO"""
    return _names(())


def _names(labels: Iterable[str]) -> dict[str, str | None]:
    """One or two words → class, or None for phrases that name no object"""
    names: dict[str, str | None] = dict.fromkeys(_NOTHING)
    for entry in " ".join(_NAMES.split()).split(";"):
        name, _, others = (part.strip() for part in entry.partition(":"))
        names |= dict.fromkeys((name, *(other.strip() for other in others.split(",") if other)), name)
    return {label: label for label in labels if _singular(label, names) not in names} | names
