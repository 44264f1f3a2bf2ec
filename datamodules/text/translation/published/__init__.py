"""IWSLT'14 and WMT'14 from raw text, prepared as the papers do; only their comparison needs it."""
