//! Verifies stored histories, offline.
