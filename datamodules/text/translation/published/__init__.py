"""IWSLT'14 and WMT'14, prepared from raw text as in the papers."""
