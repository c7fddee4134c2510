"""Plain data for the eye: tables and pictures, as text and as HTML."""
