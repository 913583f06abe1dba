"""The seam to what converters take from training. This package holds none; kvasir-lab adds two modules.

``texts`` has ``default_texts(model)``, the texts of a calibration for which nobody named a file. ``heal`` has the
function ``heal``, which trains a converted model on its source's answers.
"""
