"""Studies: each module measures one question and writes one result. ``python -m kvasir_lab.studies`` lists them."""
