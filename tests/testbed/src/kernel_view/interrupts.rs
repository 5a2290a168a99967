//! `/proc/interrupts`: interrupt counts.

/// One line of `/proc/interrupts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupt {
    /// The kernel's interrupt number or short name.
    pub number: String,
    /// Its count, summed over all CPUs.
    pub count: u64,
    /// Chip, kind and handler: `IR-PCI-MSIX-0000:00:04.0 1-edge
    /// vfio-msix[1](0000:00:04.0)`.
    pub what: String,
}

/// Parses the text of `/proc/interrupts`.
pub fn interrupts(text: &str) -> Vec<Interrupt> {
    let mut lines = text.lines();
    let processors = lines
        .next()
        .map_or(0, |heads| heads.split_whitespace().count());
    lines
        .filter_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let words: Vec<&str> = rest.split_whitespace().collect();
            let counts: Vec<u64> = words
                .iter()
                .take(processors)
                .map_while(|word| word.parse().ok())
                .collect();
            Some(Interrupt {
                number: number.trim().to_owned(),
                count: counts.iter().sum(),
                what: words[counts.len()..].join(" "),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_processors_are_added() {
        let text = "            CPU0       CPU1       
  25:          3          4  IR-PCI-MSIX-0000:00:04.0    1-edge      vfio-msix[1](0000:00:04.0)
 NMI:          0          0  Non-maskable interrupts
 ERR:          7
";
        let found = interrupts(text);
        assert_eq!(found.len(), 3);
        assert_eq!((&*found[0].number, found[0].count), ("25", 7));
        assert!(found[0].what.ends_with("vfio-msix[1](0000:00:04.0)"));
        assert_eq!((found[2].count, &*found[2].what), (7, ""));
    }
}
