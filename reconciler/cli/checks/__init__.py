"""The doctor's checks: each looks at what was found or answered and says ok, warn or bad, with the fix."""
