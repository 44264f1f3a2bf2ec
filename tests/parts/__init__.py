"""All tests by folder, resumable: `make test-full`."""
