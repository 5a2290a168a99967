//! Address domains and windows between a lender and a borrower.
