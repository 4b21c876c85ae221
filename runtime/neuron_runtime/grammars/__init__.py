"""Which tokens keep to the form of an answer: forms to grammars, grammars to masks, by llguidance.

The engine calls `guides` through `engine/guides.py`. Nothing here knows rows, slots, text of answers or HTTP.
"""
