//! The versioned protocol between a backend and a lender.
