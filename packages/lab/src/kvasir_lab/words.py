"""Common words that are one token each after a space in the lab's tokenizer, for tasks with short texts."""

from __future__ import annotations

NOUNS = tuple(
    """king queen prince princess wolf bear lion cat dog bird horse fish fox giant maiden girl boy child mother father
    brother sister master servant friend woman husband wife lady youth animal beast crow raven""".split()
)
PEOPLE = tuple(
    """king queen prince princess wolf bear horse bird fish giant maiden girl child mother father lady youth beast woman
    creature light star moon river forest mountain castle palace garden ship sword ring corn bread tree rock road town
    house horn""".split()
)
LINKS = ("friend", "brother", "sister", "master", "servant", "neighbour")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTVW")
PLACES = tuple(
    "river forest castle palace garden mountain road town house kitchen wood window table tree rock field".split()
)
THINGS = tuple("ring sword book bread letter rose stone picture recipe drink dress wand song meat ship flower".split())
TIMES = ("morning", "evening", "night", "winter", "summer", "spring", "dark", "rain")
MOODS = tuple("great little old young beautiful clever poor rich kind good strong quiet tired happy bad brave".split())
