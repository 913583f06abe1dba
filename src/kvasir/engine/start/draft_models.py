"""The models that drafters draw from: a second one, built before the served model, and that model's first layers."""

from __future__ import annotations

from kvasir import technique
from kvasir.config import CacheConfig, EngineConfig
from kvasir.engine.drafts.early_exit import EarlyExit
from kvasir.engine.drafts.mtp_rows import MTPRows
from kvasir.engine.drafts.second_model import SecondModel
from kvasir.engine.drafts.vocabularies import Translation, Vocabulary, translation
from kvasir.engine.pages.page_pool import pages_for
from kvasir.engine.pages.pages import PageManager
from kvasir.engine.start.build import Built, build
from kvasir.errors import ConfigError
from kvasir.layers.product_backend import OWN
from kvasir.logs import log
from kvasir.models import checkpoint
from kvasir.models.families import build_spec
from kvasir.models.pooling import read_pooling
from kvasir.speculation.drafter import DRAFTERS, Drafter

AUTO = "auto"  # in place of a drafter: the one that the checkpoint brings


def settled(config: EngineConfig) -> EngineConfig:
    """The settings with the drafter that ``--drafter auto`` stands for: the first one whose weights the checkpoint
    brings, or none."""
    if config.speculation.drafter != AUTO:
        return config
    if config.cache.kv_policy != CacheConfig().kv_policy:  # such layers keep their keys by position
        log.info("--drafter auto: none, as --kv-policy moves what is in the pages")
        return config.replace(drafter="")
    path = checkpoint.resolve(config.model.model, config.model.revision)
    if read_pooling(path, checkpoint.read_config(path), config.model.task, config.model.model) is not None:
        return config.replace(drafter="")  # it draws no tokens
    known = technique.of_all(DRAFTERS, lambda name: technique.find(DRAFTERS, name, Drafter)[0])
    found = next((drafter.name for drafter in known if drafter.comes_with(path)), "")
    log.info("--drafter auto: %s", found or "the checkpoint brings no drafter")
    return config.replace(drafter=found)


class EngineHost:
    """Implementation of ``drafter.Host``: loads models before the served model, and checks later that they fit it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._models: list[SecondModel] = []
        self._exits: list[EarlyExit] = []
        self._mtp: MTPRows | None = None

    @property
    def mtp(self) -> bool:
        """Whether the served model is loaded with its MTP layer."""
        return self._mtp is not None

    def mtp_model(self) -> MTPRows:
        self._mtp = self._mtp or MTPRows()
        return self._mtp

    def exit_model(self, exits: tuple[int, ...]) -> EarlyExit:
        self._exits.append(EarlyExit(exits))
        return self._exits[-1]

    def bind(self, built: Built, pages: PageManager) -> None:
        """Hand the early exits and the MTP layer the served model and its pages."""
        for model in self._exits:
            model.bind(built.runner, pages, built.max_rows, built.info.max_model_len)
        if self._mtp is not None:
            self._mtp.bind(built.runner, pages, built.info.max_model_len)

    def chain_model(self, model: str, kv_tokens: int, keep: bool = False, trees: bool = False) -> SecondModel:
        config = self._config
        if keep and config.runner.batch_invariant:
            raise ConfigError(
                "max_accept keeps the distribution of tokens and not the tokens, which --batch-invariant promises. "
                "Leave out one of the two; in exact mode, drafts without max_accept change no token."
            )
        longest, wanted = (
            build_spec(checkpoint.read_config(checkpoint.resolve(model))).max_position,
            config.model.max_model_len,
        )
        # A backend for the target's pages need not know this model's shapes, and a restarted process names the target's
        # choice.
        own = config.replace(
            model=model,
            max_model_len=wanted and min(wanted, longest),
            revision=None,
            served_model_name=None,
            tokenizer=None,
            kv_codec=CacheConfig().kv_codec,
            kv_policy=CacheConfig().kv_policy,
            page_slots=None,
            attention_backend="auto",
            product_backend=OWN,
            recurrence_backend="auto",
            drafter="",
            fit=True,
            batch_invariant=False,
            num_pages=pages_for(kv_tokens, 16),
        )
        built = build(own, trees=trees)
        if any(group.kind == "state" for group in built.runner.pool.groups):
            raise ConfigError(
                f"the draft model {model} has recurrent layers, whose states cannot take back what was drafted. Choose "
                "one whose layers all attend, or --drafter suffix, which needs no model."
            )
        pool = built.runner.pool
        pages = PageManager(pool.groups, built.plan.num_pages, pool.page_slots, built.prefix_root)
        found = SecondModel(built.info, built.runner, pages, built.max_rows, built.max_num_seqs)
        found.tokenizer_file, found.keeps = built.tokenizer_file, keep
        self._models.append(found)
        return self._models[-1]

    def check(self, served: Built) -> None:
        """Let the draft models speak with the served model's ids. Raises ConfigError where their token ids mean
        different things."""
        for model in self._models:
            model.translate(self._translation(model, served))

    def _translation(self, model: SecondModel, served: Built) -> Translation | None:
        """The translation between the ids of a draft model and of the served one; None: they are the same."""
        info, file, other = model.info, model.tokenizer_file, served.tokenizer_file
        sizes = (info.vocab_size, info.tokenizer_size), (served.info.vocab_size, served.info.tokenizer_size)
        if file is not None and other is not None:
            if sizes[0] == sizes[1] and file.read_bytes() == other.read_bytes():
                return None
            try:
                found = translation(Vocabulary.read(file), info.vocab_size, Vocabulary.read(other), sizes[1][0])
            except ValueError as e:
                raise ConfigError(
                    f"the draft model {info.name} has another vocabulary than {served.info.name}: {e}. Choose one of "
                    "the same family, or --drafter suffix, which needs no model."
                ) from e
            if found is not None and model.keeps:
                raise ConfigError(
                    f"the draft model {info.name} has other token ids than {served.info.name}, and max_accept compares "
                    "their distributions. Leave out max_accept: ids are translated without it."
                )
            if found is not None:
                log.info(
                    "draft model %s: %d of its %d tokens are known to %s",
                    info.name,
                    int((found.served_of >= 0).sum()),
                    info.tokenizer_size,
                    served.info.name,
                )
            return found
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the draft model {info.name} has {info.tokenizer_size} of {info.vocab_size} token ids in use, "
                f"{served.info.name} has {served.info.tokenizer_size} of {served.info.vocab_size}, and without a "
                "tokenizer.json of both their tokens cannot be compared. Add the files, choose a model of the same "
                "vocabulary, or --drafter suffix, which needs no model."
            )
        return None
