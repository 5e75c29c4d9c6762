"""The picture of a step: a box for every span, in one panel or in two."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings

from mm.parallel.activity import Activity, Work
from mm.timeline.picture import draw
from mm.timeline.spans import Moment, RankRecord, extent
from tests.timeline.records import record, records, timeline

SVG = "{http://www.w3.org/2000/svg}"


@settings(max_examples=20)
@given(records)
def test_the_picture_is_well_formed_and_has_a_box_for_every_span(found: list[RankRecord]) -> None:
    """Boxes have a title.  Those below a fifth of a pixel are omitted."""
    picture = ElementTree.fromstring(draw([timeline(found)], "a.json"))
    boxes = [one for one in picture.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    start, end = extent(found)
    widths = [760 * span.seconds / max(end - start, 1e-9) for one in found for span in one.spans]
    assert [float(box.attrib["width"]) for box in boxes] == [
        pytest.approx(width, abs=0.01) for width in widths if width >= 0.2]
    for box in boxes:
        assert 159.99 <= float(box.attrib["x"]) <= 920.01 - float(box.attrib["width"])
    assert next(iter(picture)).attrib["fill"] == "#ffffff"  # for viewers with a dark background


def test_boxes_are_labelled() -> None:
    """A backward pass has the colour of its forward pass; only the first rank of a stage is drawn."""
    vision, language, backward = Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD
    moments = [one for index, (work, microbatch) in enumerate([
        (language, 0), (vision, 0), (language, 1), (backward, 0), (backward, 1)])
        for one in (Moment(index, Activity(work, 1, microbatch)), Moment(index + 1, None))]
    picture = ElementTree.fromstring(draw([timeline([record(0, moments), record(1, moments, stage=0)])], "a.json"))
    titles = [one.text for one in picture.iter(f"{SVG}title")]
    assert [title.partition(":")[0] for title in titles] == [
        "LLM forward 0b", "ViT forward 0b", "LLM forward 1b", "ViT and LLM backward 0b", "LLM backward 1b"]
    assert titles[1].endswith(": 1,000.00 to 2,000.00 ms")
    texts = [one.text or "" for one in picture.iter(f"{SVG}text")]
    assert {"stage 0 (rank 0)", "0b", "100.0%", "4,500", "time (ms)", "bubble"} <= set(texts)
    assert "Microbatches: 2, stages: 1, each of 2 chunks, time: 5,000.0 ms." in " ".join(texts)


def test_a_prediction_stands_above_the_measured_step_on_one_scale() -> None:
    forward, update = Activity(Work.LANGUAGE_FORWARD, 0, 0), Activity(Work.UPDATE)
    short = record(0, [Moment(0, forward), Moment(1, None), Moment(1, update), Moment(2, None)])
    long = record(0, [Moment(0, forward), Moment(3, None), Moment(3, update), Moment(4, None)])
    text = draw([timeline([short], is_predicted=True), timeline([long])], "a.json", ["one note", "and <another>"])
    picture = ElementTree.fromstring(text)
    panels = list(picture.iter(f"{SVG}g"))
    widths = [[float(box.attrib["width"]) for box in panel.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
              for panel in panels]
    assert widths == [[190.0, 190.0], [570.0, 190.0]]
    headings = [one.text for panel in panels for one in panel.iter(f"{SVG}text") if one.attrib["font-size"] == "18"]
    assert headings == ["Predicted step: iteration 7", "Measured step: iteration 7"]
    texts = [one.text for one in picture.iter(f"{SVG}text")]
    assert "one note" in texts and "and <another>" in texts
    bottom = float(picture.attrib["height"])
    assert all(float(one.attrib["y"]) < bottom for one in picture.iter(f"{SVG}text"))
    assert texts.count("LLM forward") == 1  # one legend for both
