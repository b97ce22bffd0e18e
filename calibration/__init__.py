"""Calibration: the text, the sample conversation, and the sensitivity profiles measured with them."""
