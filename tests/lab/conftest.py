import pytest
import torch

from kvasir_lab.tokenizer import shipped_tokenizer


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return shipped_tokenizer()
