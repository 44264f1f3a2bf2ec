"""Tasks of the Long Range Arena."""

RELEASE = (
    "the Long Range Arena release (github.com/google-research/long-range-arena, lra_release.gz)"
)
