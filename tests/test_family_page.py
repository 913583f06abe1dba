"""The page of model families says what the code declares, and every family is compared with transformers."""

from kvasir import technique
from kvasir.models.families import FAMILIES, find_family
from tests import checkpoints, family_page


def test_the_page_is_that_of_the_code():
    assert family_page.PAGE.read_text() == family_page.page(), "write it again: python -m tests.family_page"


# Layouts that only our converters write, compared with their sources in tests/convert/.
CONVERTED = {"kvasir_mla"}


def test_every_family_is_compared():
    compared = {model for _, model, _ in checkpoints.VARIANTS.values()}
    for name in sorted(set(technique.own(FAMILIES)) - CONVERTED):
        assert compared & set(find_family(name).ARCHITECTURES), f"{name}: add it to tests/checkpoints.py"
