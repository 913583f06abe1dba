"""The page of model families says what the code declares, and every family is compared with transformers."""

from kvasir import technique
from kvasir.models.families import FAMILIES, find_family
from tests import checkpoints, family_page


def test_the_page_is_that_of_the_code():
    assert family_page.PAGE.read_text() == family_page.page(), "write it again: python -m tests.family_page"


# Layouts of our own: what converters write is compared with its source in tests/convert/, and mixers for research with
# references in tests/layers/test_recurrence.py. transformers has no MiMo, whose layers are those of Qwen 2: they are
# compared in tests/models/test_mtp.py.
OWN = {"kvasir_mla", "kvasir_mamba3", "kvasir_m2rnn", "mimo"}


def test_every_family_is_compared():
    compared = {model for _, model, _ in checkpoints.VARIANTS.values()}
    for name in sorted(set(technique.own(FAMILIES)) - OWN):
        assert compared & set(find_family(name).ARCHITECTURES), f"{name}: add it to tests/checkpoints.py"
