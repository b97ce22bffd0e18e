"""Reference runtime of an EpiCache bundle: what a phone does, in numpy around one inference engine."""
