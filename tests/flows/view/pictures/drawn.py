"""What a picture has, for tests: it is parsed as a browser would."""

from xml.etree import ElementTree

from prefect_rlhf.flows.view.pictures.svg import Picture


def elements_of(picture: Picture) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture.alone()).iter())


def of_class(picture: Picture, name: str) -> list[ElementTree.Element]:
    """Its elements of a class."""
    return [found for found in elements_of(picture) if name in (found.get("class") or "").split()]


def texts(picture: Picture) -> list[str]:
    """Its lines of text, without those that only a mouse shows."""
    return [each.text or "" for each in elements_of(picture) if each.tag.endswith(("}text", "}tspan"))]


def hints(picture: Picture) -> list[str]:
    """What a mouse shows."""
    return [each.text or "" for each in elements_of(picture) if each.tag.endswith("}title")]
