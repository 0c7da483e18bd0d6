//! Members of a family that are collected when a program is linked, and those that it adds while it runs.

/// Defines where a family's members are collected: a type for `inventory`, and the functions `register`, `registered` and
/// `entries` of the module that it stands in.
///
/// The crate of the family offers a macro for its users' crates, which submits `ENTRY::of::<C>()`.
#[macro_export]
macro_rules! collected {
    ($(#[$doc:meta])* pub struct $entry:ident($family:ty);) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $entry($crate::Entry<$family>);

        $crate::inventory::collect!($entry);

        impl $entry {
            /// Makes the entry of a type.
            pub const fn of<C: $crate::Registered>() -> Self
            where
                $family: $crate::Holds<C>,
            {
                Self($crate::Entry::of::<C>())
            }
        }

        static ADDED: $crate::Entries<$crate::Entry<$family>> = $crate::Entries::new();

        fn linked() -> impl Iterator<Item = $crate::Entry<$family>> {
            $crate::inventory::iter::<$entry>().map(|entry| entry.0)
        }

        fn entries() -> Vec<$crate::Entry<$family>> {
            ADDED.all(linked())
        }

        /// Registers a type while the program runs, before a configuration is read. The same type may be registered twice.
        pub fn register<C: $crate::Registered>()
        where
            $family: $crate::Holds<C>,
        {
            ADDED.add(linked(), $crate::Entry::of::<C>());
        }

        /// Returns the names of all registered types, sorted.
        pub fn registered() -> Vec<&'static str> {
            entries().iter().map($crate::Named::name).collect()
        }
    };
}
