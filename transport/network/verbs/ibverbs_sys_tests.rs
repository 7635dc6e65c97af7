//! The opening of libibverbs: the system's, and stand-ins that lack something.

use super::*;
use crate::transport::network::library::tests::{compile, skip};

/// The calls that any libibverbs has.
const CALLS: &str = "get_device_list free_device_list get_device_name open_device close_device query_device query_port \
                     query_gid query_pkey get_async_event ack_async_event alloc_pd dealloc_pd reg_mr dereg_mr create_cq destroy_cq \
                     create_srq destroy_srq create_qp modify_qp query_qp destroy_qp create_ah destroy_ah \
                     wc_status_str event_type_str fork_init";

/// A library of these calls but one.
fn without(lacking: &str) -> String {
    let calls = CALLS.split_whitespace().filter(|call| *call != lacking);
    calls.map(|call| format!("int ibv_{call}(void) {{ return 0; }}\n")).collect()
}

#[test]
fn a_libibverbs_that_is_not_there_is_named_with_the_packages() {
    let error = Library::at(Path::new("/nowhere/libibverbs.so.1")).unwrap_err();
    assert!(matches!(&error, Error::Transport { fatal: false, .. }));
    let text = error.to_string();
    for part in ["/nowhere/libibverbs.so.1 cannot be opened", "ibverbs-providers", VARIABLE] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_libibverbs_that_lacks_a_call_it_must_have() {
    for call in ["get_device_list", "create_srq", "fork_init"] {
        let Some((_folder, path)) = compile(&without(call)) else { return };
        let text = Library::at(&path).unwrap_err().to_string();
        assert!(text.contains(&format!("has no ibv_{call}")) && text.contains("rdma-core"), "{text}");
    }
}

#[test]
fn a_call_that_came_later_is_missed_when_it_is_asked_for() {
    let Some((_folder, path)) = compile(&without("")) else { return };
    let library = Library::at(&path).unwrap();
    assert_eq!((library.path(), library.offers().as_str()), (path.as_path(), "nothing optional"));
    let text = library.need(library.ibv_reg_dmabuf_mr, "ibv_reg_dmabuf_mr", 34).unwrap_err().to_string();
    assert!(text.contains("has no ibv_reg_dmabuf_mr") && text.contains("rdma-core 34 or later"), "{text}");

    let Some((_folder, path)) = compile(&(without("") + "int ibv_reg_dmabuf_mr(void) { return 0; }")) else { return };
    let library = Library::at(&path).unwrap();
    assert_eq!(library.offers(), "dma-buf");
    assert!(library.need(library.ibv_reg_dmabuf_mr, "ibv_reg_dmabuf_mr", 34).is_ok());
}

#[test]
fn the_systems_libibverbs_is_opened_and_lists_its_devices() {
    let library = match Library::at(Path::new(USUAL)) {
        Ok(library) => library,
        Err(error) => return skip(&error.to_string()),
    };
    assert_eq!(library.offers(), "dma-buf, relaxed ordering, types of GIDs");
    let mut count = -1;
    // SAFETY: the number outlives the call; the list is freed once; the text stays.
    unsafe {
        let list = (library.ibv_get_device_list)(&mut count);
        assert!(list.is_null() || count >= 0);
        if !list.is_null() {
            (library.ibv_free_device_list)(list);
        }
        let text = CStr::from_ptr((library.ibv_wc_status_str)(IBV_WC_RNR_RETRY_EXC_ERR));
        assert!(text.to_string_lossy().contains("RNR"), "{text:?}");
    }
    match (Mlx5::open(), Efa::open()) {
        (Ok(mlx5), Ok(efa)) => assert!(mlx5.path().is_absolute() && efa.path().is_absolute()),
        (Err(error), _) | (_, Err(error)) => skip(&error.to_string()),
    }
}

#[test]
fn a_context_without_a_call_answers_enosys() {
    // SAFETY: plain data on this stack; no function is in the table.
    unsafe {
        let mut context: ibv_context = std::mem::zeroed();
        let (mut qp, mut cq, mut srq): (ibv_qp, ibv_cq, ibv_srq) =
            (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed());
        let context = &raw mut context;
        (qp.context, cq.context, srq.context) = (context, context, context);
        let (mut bad, mut late) = (std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(ibv_post_send(&mut qp, std::ptr::null_mut(), &mut bad), libc::ENOSYS);
        assert_eq!(ibv_post_recv(&mut qp, std::ptr::null_mut(), &mut late), libc::ENOSYS);
        assert_eq!(ibv_post_srq_recv(&mut srq, std::ptr::null_mut(), &mut late), libc::ENOSYS);
        assert_eq!(ibv_poll_cq(&mut cq, 1, std::ptr::null_mut()), -libc::ENOSYS);
    }
}
