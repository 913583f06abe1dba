"""Drafts that are chains, whatever the drafter proposes: in models with recurrent layers, whose states are no rows that
a tree could share, and in exact mode on a GPU. There the rows of a tree have their keys in other slots than those of a
chain, and are added in another order."""

from __future__ import annotations

from dataclasses import replace

from kvasir.engine.schedule.spans import ends_in_one_chain
from kvasir.errors import ConfigError
from kvasir.layers.spec import LOOK_AHEAD
from kvasir.logs import log
from kvasir.speculation.drafter import Drafter
from kvasir.speculation.tree import DraftTree

# Most drafts of a sequence in a model with recurrent layers: these and the last token wait in look-ahead slots.
STATE_DRAFTS = LOOK_AHEAD - 1


def check_exact(drafter: Drafter) -> None:
    """Say how drafts differ in exact mode on a GPU. Raises ConfigError for a drafter that does not fit."""
    if drafter.guests is not None and not drafter.tail:
        raise ConfigError(
            f"--drafter {drafter.name} adds several rows for each token that it guesses, and in exact mode a GPU "
            "computes one chain a sequence. Leave out --batch-invariant, or choose a drafter of chains, such as "
            "--drafter suffix."
        )
    log.info("exact mode: drafts are chains; %s's trees are cut to their likeliest path", drafter.name)


def in_one_chain(tree: DraftTree, tail: tuple[int, ...]) -> DraftTree:
    """Return the trunk of a tree, and in place of all guests the chain ``tail`` behind its last node."""
    if tree.is_chain and (not tree.guests or ends_in_one_chain(tree.guests, len(tree) - 1)):
        return tree
    chain = tree.trunk()
    return replace(chain, guests={len(chain) - 1: (tail,)} if tree.guests else {})


def check_states(drafter: Drafter, max_draft_tokens: int) -> None:
    """Say how drafts of a model with recurrent layers differ. Raises ConfigError for a drafter that does not fit."""
    if drafter.guests is not None:
        raise ConfigError(
            f"--drafter {drafter.name} adds rows of its own to a step, which would go into the states of this model's "
            "recurrent layers. Choose a drafter of chains, such as --drafter suffix or ngram."
        )
    log.info(
        "recurrent layers: drafts are chains of at most %d tokens; %s's trees are cut to their likeliest path",
        min(max_draft_tokens, STATE_DRAFTS),
        drafter.name,
    )
