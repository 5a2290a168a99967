//! Physical PCI functions and their IOMMU domains, through Linux VFIO.
