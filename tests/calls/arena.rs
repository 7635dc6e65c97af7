//! Contexts whose arenas lie in host memory. On the CPU device that is no choice; `TOKENYARD_TEST_DEVICE=cuda` makes it
//! one.

use crate::rig;

use rig::{Rig, builder, on_ranks, test_device};
use tokenyard::{ArenaPlace, DeviceKind};

#[test]
fn rounds_through_host_memory() {
    on_ranks(3, |world| {
        let rig = Rig::with(&world, |builder| builder.tuning(|t| t.arena = ArenaPlace::Host));
        (0..4).for_each(|salt| rig.good_round(salt));
        world.barrier("done").unwrap();
    });
}

#[test]
fn ranks_that_differ_in_place_are_refused_before_anything_is_mapped() {
    on_ranks(2, |world| {
        let place = [ArenaPlace::Device, ArenaPlace::Host][world.rank().index()];
        let device = test_device(&world);
        let built = builder(&world, &device).tuning(|t| t.arena = place).build();
        if device.kind() == DeviceKind::Cpu {
            assert!(built.is_ok(), "all memory of the CPU device is host memory: {:?}", built.err());
        } else {
            let why = built.err().map(|why| why.to_string()).unwrap_or_default();
            assert!(why.contains("arena=") && why.contains("same configuration"), "{why}");
        }
        world.barrier("done").unwrap();
    });
}
