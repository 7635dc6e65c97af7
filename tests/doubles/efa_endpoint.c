/* Endpoints of the EFA double: opening, binding, options, closing. */
#include "efa.h"

#define RX_CQ_DATA (1ULL << 56) /* FI_RX_CQ_DATA */

/* include/rdma/fi_ext.h and fi_endpoint.h of tag v2.6.0; headers of version 1.17 name the first only. */
enum {
    OPT_RNR_RETRY = -(0xefa << 16),
    OPT_EMULATED_READ,
    OPT_EMULATED_WRITE,
    OPT_EMULATED_ATOMICS,
    OPT_USE_DEVICE_RDMA,
    OPT_SENDRECV_IN_ORDER,
    OPT_WRITE_IN_ORDER,
    OPT_HOMOGENEOUS_PEERS,
    OPT_UNSOLICITED,
    OPT_HMEM_P2P = 8,
    OPT_CUDA_API_PERMITTED = 10,
    OPT_SHARED_MEMORY_PERMITTED,
    OPT_MAX_MSG_SIZE,
    OPT_MAX_TAGGED_SIZE,
    OPT_MAX_RMA_SIZE,
    OPT_MAX_ATOMIC_SIZE,
    OPT_INJECT_MSG_SIZE,
    OPT_INJECT_TAGGED_SIZE,
    OPT_INJECT_RMA_SIZE,
};

static uint32_t api(const struct endpoint *endpoint) { return endpoint->domain->fabric->fid.api_version; }

/* prov/efa/src/rdm/efa_rdm_util.c, efa_rdm_get_use_device_rdma: from API 1.18 as the device can, below it not on
 * devices 0xefa0 and 0xefa1. The environment overrides both; asking for what the device lacks aborts. */
bool uses_device_rdma(uint32_t api) {
    bool by_default = config.rdma;
    if (api < FI_VERSION(1, 18))
        by_default = config.rdma && config.part_id != 0xefa0 && config.part_id != 0xefa1;
    const char *text = getenv("FI_EFA_USE_DEVICE_RDMA");
    if (!text || !*text)
        return by_default;
    bool wanted = *text == '1' || *text == 't' || *text == 'y' || !strcmp(text, "on");
    if (wanted && !config.rdma) {
        fprintf(stderr,
                "EFA double: FI_EFA_USE_DEVICE_RDMA is set, but the device has no RDMA; aborting as EFA does\n");
        abort();
    }
    return wanted;
}

static int answer_size(void *value, size_t *bytes, size_t number) {
    if (*bytes < sizeof number)
        return -FI_ETOOSMALL;
    memcpy(value, &number, sizeof number);
    *bytes = sizeof number;
    return 0;
}

static int answer_truth(void *value, size_t *bytes, bool truth) {
    if (*bytes < sizeof truth)
        return -FI_ETOOSMALL;
    memcpy(value, &truth, sizeof truth);
    *bytes = sizeof truth;
    return 0;
}

/* prov/efa/src/efa_ep.c, efa_ep_getopt. */
static int get_option(fid_t fid, int level, int option, void *value, size_t *bytes) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (level != FI_OPT_ENDPOINT)
        return -FI_ENOPROTOOPT;
    switch (option) {
    case OPT_RNR_RETRY: return answer_size(value, bytes, endpoint->rnr_retry);
    case OPT_EMULATED_READ:
    case OPT_EMULATED_WRITE:
        if (config.version < FI_VERSION(1, 18))
            return -FI_ENOPROTOOPT; /* include/rdma/fi_ext.h: from tag v1.18.0 */
        return answer_truth(value, bytes, endpoint->is_emulated);
    case OPT_EMULATED_ATOMICS:
        return endpoint->is_direct ? -FI_ENOPROTOOPT : answer_truth(value, bytes, true);
    case OPT_HMEM_P2P: {
        int mode = endpoint->is_direct ? FI_HMEM_P2P_REQUIRED : FI_HMEM_P2P_ENABLED;
        if (*bytes < sizeof mode)
            return -FI_ETOOSMALL;
        memcpy(value, &mode, sizeof mode);
        *bytes = sizeof mode;
        return 0;
    }
    case OPT_MAX_MSG_SIZE: return answer_size(value, bytes, endpoint->is_direct ? config.mtu : SIZE_MAX);
    case OPT_MAX_RMA_SIZE: return answer_size(value, bytes, endpoint->is_direct ? config.max_rdma : SIZE_MAX);
    case OPT_INJECT_RMA_SIZE:
        /* ofiwg/libfabric pull request 12858: 0 on efa-direct before version 2.6. */
        if (endpoint->is_direct && config.version < FI_VERSION(2, 6))
            return answer_size(value, bytes, 0);
        return answer_size(value, bytes, endpoint->inject);
    case OPT_INJECT_MSG_SIZE: return answer_size(value, bytes, endpoint->inject);
    default: return -FI_ENOPROTOOPT;
    }
}

/* prov/efa/src/efa_ep.c, efa_ep_setopt, and rdm/efa_rdm_ep_fiops.c for the fabric efa. */
static int set_option(fid_t fid, int level, int option, const void *value, size_t bytes) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    bool truth = false;
    if (level != FI_OPT_ENDPOINT)
        return -FI_ENOPROTOOPT;
    if (option > OPT_RNR_RETRY && option <= OPT_UNSOLICITED) {
        if (bytes != sizeof truth)
            return -FI_EINVAL;
        memcpy(&truth, value, sizeof truth);
    }
    switch (option) {
    case OPT_RNR_RETRY:
        if (bytes != sizeof(size_t) || endpoint->is_enabled) /* only before fi_enable */
            return -FI_EINVAL;
        memcpy(&endpoint->rnr_retry, value, sizeof(size_t));
        return 0;
    case OPT_HMEM_P2P: {
        int mode;
        if (bytes != sizeof mode)
            return -FI_EINVAL;
        memcpy(&mode, value, sizeof mode);
        /* efa-direct needs p2p. The fabric efa, efa_hmem.c, efa_hmem_validate_p2p_opt: it must be there if required,
         * and only CUDA of API 1.18 does without. */
        if (endpoint->is_direct)
            return mode == FI_HMEM_P2P_DISABLED ? -FI_EOPNOTSUPP : 0;
        if (!config.gpus || mode < FI_HMEM_P2P_ENABLED || mode > FI_HMEM_P2P_DISABLED)
            return -FI_EINVAL;
        bool is_supported = mode == FI_HMEM_P2P_DISABLED   ? api(endpoint) >= FI_VERSION(1, 18)
                            : mode == FI_HMEM_P2P_REQUIRED ? config.p2p
                                                           : !config.p2p_disabled;
        return is_supported ? 0 : -FI_EOPNOTSUPP;
    }
    case OPT_CUDA_API_PERMITTED:
        if (endpoint->is_direct)
            return 0; /* it calls nothing of CUDA */
        if (bytes != sizeof truth || !config.gpus)
            return -FI_EINVAL;
        /* rdm/efa_rdm_ep_fiops.c, efa_rdm_ep_set_cuda_api_permitted: without CUDA's calls p2p must be there. */
        memcpy(&truth, value, sizeof truth);
        return truth || config.p2p ? 0 : -FI_EOPNOTSUPP;
    case OPT_SHARED_MEMORY_PERMITTED:
        if (endpoint->is_direct)
            return 0; /* it never uses shared memory */
        if (bytes != sizeof truth)
            return -FI_EINVAL;
        /* fi_efa(7), FI_EFA_ENABLE_SHM_TRANSFER. */
        memcpy(&truth, value, sizeof truth);
        if (truth && !config.shm_transfer)
            return -FI_EINVAL;
        endpoint->uses_shm = truth && endpoint->has_shm;
        return 0;
    case OPT_USE_DEVICE_RDMA:
        if (endpoint->is_direct)
            return truth || !(endpoint->caps & FI_RMA) ? 0 : -FI_EOPNOTSUPP;
        if (api(endpoint) < FI_VERSION(1, 18))
            return -FI_ENOPROTOOPT; /* fi_efa(7), FI_OPT_EFA_USE_DEVICE_RDMA */
        if (truth && !config.rdma)
            return -FI_EOPNOTSUPP;
        if (getenv("FI_EFA_USE_DEVICE_RDMA") && uses_device_rdma(api(endpoint)) != truth)
            return -FI_EINVAL;
        endpoint->is_emulated = !truth;
        return 0;
    case OPT_SENDRECV_IN_ORDER:
    case OPT_WRITE_IN_ORDER:
        return truth ? -FI_EOPNOTSUPP : 0; /* this device delivers in no order */
    case OPT_HOMOGENEOUS_PEERS:
        endpoint->is_homogeneous = truth && !endpoint->is_direct;
        return 0;
    case OPT_UNSOLICITED:
        if (config.version < FI_VERSION(2, 3))
            return -FI_ENOPROTOOPT; /* ofiwg/libfabric pull requests 11675 and 11695 */
        if (endpoint->is_direct && !truth && !endpoint->takes_cq_data)
            return -FI_EOPNOTSUPP; /* fi_efa(7), FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV */
        if (endpoint->is_enabled)
            return -FI_EINVAL;
        endpoint->is_unsolicited = truth && config.unsolicited;
        return 0;
    default: return -FI_ENOPROTOOPT;
    }
}

/* fi_cancel is not supported on efa-direct: fi_efa(7). */
static ssize_t cancel(fid_t fid, void *context) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (endpoint->is_direct)
        return -FI_ENOSYS;
    lock(endpoint->domain);
    for (uint32_t i = 0; i < endpoint->posted_count; i++) {
        uint32_t at = (endpoint->posted_head + i) % endpoint->receives;
        if (endpoint->posted[at].context != context)
            continue;
        struct entry entry = {.endpoint = endpoint, .context = context, .flags = FI_RECV | FI_MSG,
                              .kind = ENTRY_RECEIVE, .status = 1}; /* FI_ECANCELED: fi_endpoint(3) */
        for (; i + 1 < endpoint->posted_count; i++) {
            uint32_t to = (endpoint->posted_head + i) % endpoint->receives;
            endpoint->posted[to] = endpoint->posted[(to + 1) % endpoint->receives];
        }
        endpoint->posted_count--;
        push_entry(endpoint->rx_cq, &entry);
        break;
    }
    unlock(endpoint->domain);
    return 0;
}

static int get_name(fid_t fid, void *name, size_t *bytes) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    bool fits = *bytes >= sizeof(struct name);
    *bytes = sizeof(struct name); /* fi_cm(3): the size needed is told */
    if (!fits)
        return -FI_ETOOSMALL;
    memcpy(name, &endpoint->name, sizeof(struct name));
    return 0;
}

static int bind(struct fid *fid, struct fid *other, uint64_t flags) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (other->fclass == FI_CLASS_CQ) {
        struct cq *cq = (struct cq *)other;
        if (!(flags & (FI_RECV | FI_TRANSMIT)))
            return -FI_EBADFLAGS;
        if (cq->domain != endpoint->domain)
            return -FI_EINVAL;
        if (((flags & FI_TRANSMIT) && endpoint->tx_cq) || ((flags & FI_RECV) && endpoint->rx_cq))
            return -FI_EINVAL;
        bool is_known = endpoint->tx_cq == cq || endpoint->rx_cq == cq;
        if (!is_known && cq->endpoint_count == sizeof cq->endpoints / sizeof *cq->endpoints)
            return -FI_ENOMEM;
        if (flags & FI_TRANSMIT) {
            endpoint->tx_cq = cq;
            endpoint->is_selective = flags & FI_SELECTIVE_COMPLETION;
        }
        if (flags & FI_RECV)
            endpoint->rx_cq = cq;
        if (!is_known) {
            lock(cq->domain);
            cq->endpoints[cq->endpoint_count++] = endpoint;
            unlock(cq->domain);
        }
        return 0;
    }
    if (other->fclass == FI_CLASS_AV) {
        struct av *av = (struct av *)other;
        if (av->domain != endpoint->domain || endpoint->av)
            return -FI_EINVAL; /* efa_base_ep.c, efa_base_ep_bind_av */
        endpoint->av = av;
        return 0;
    }
    if (other->fclass == FI_CLASS_EQ) {
        endpoint->eq = (struct eq *)other;
        return 0;
    }
    return -FI_EINVAL;
}

static int enable(struct endpoint *endpoint) {
    /* efa_base_ep.c, efa_base_ep_create_and_enable_qp; util_ep_valid: a vector is needed, too. */
    if (!endpoint->tx_cq || !endpoint->rx_cq)
        return -FI_ENOCQ;
    if (!endpoint->av)
        return -FI_ENOAV;
    if (endpoint->is_enabled)
        return -FI_EINVAL;
    int error = open_qp(endpoint);
    if (error)
        return error;
    uint32_t depth = endpoint->depth;
    endpoint->ops = calloc(depth, sizeof *endpoint->ops);
    endpoint->inline_bytes = calloc(depth, endpoint->inject);
    endpoint->free = calloc(depth, sizeof *endpoint->free);
    endpoint->staged = calloc(depth, sizeof *endpoint->staged);
    endpoint->posted = calloc(endpoint->receives, sizeof *endpoint->posted);
    for (uint32_t i = 0; i < depth; i++) {
        endpoint->ops[i].inline_bytes = endpoint->inline_bytes + (size_t)i * endpoint->inject;
        endpoint->free[endpoint->free_count++] = depth - 1 - i;
    }
    endpoint->is_enabled = true;
    attach(endpoint);
    return 0;
}

static int control(struct fid *fid, int command, void *argument) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    if (command == FI_ENABLE)
        return enable(endpoint);
    if (command == FI_GETOPSFLAG && (*(uint64_t *)argument & FI_TRANSMIT))
        return *(uint64_t *)argument = endpoint->tx_flags, 0;
    if (command == FI_SETOPSFLAG && (*(uint64_t *)argument & FI_TRANSMIT))
        return endpoint->tx_flags = *(uint64_t *)argument & ~FI_TRANSMIT, 0;
    return -FI_ENOSYS;
}

void release_op(struct endpoint *endpoint, uint32_t index) {
    struct op *op = &endpoint->ops[index];
    op->state = OP_FREE;
    op->generation++;
    endpoint->free[endpoint->free_count++] = index;
}

/* rdm/efa_rdm_peer.c, efa_rdm_peer_destruct: with its address go the operations that wait for a peer's handshake. They
 * never complete, and nothing lowers the number of those that wait: rdm/efa_rdm_ope.c, efa_rdm_txe_release. */
void forget_queued(struct endpoint *endpoint, const struct name *peer) {
    for (struct link_out *link = endpoint->links; link; link = link->next) {
        if (memcmp(&link->peer, peer, sizeof *peer))
            continue;
        for (; link->queued_count; link->outstanding--) {
            uint32_t index = link->queued[--link->queued_count];
            link->reads -= endpoint->ops[index].kind == PACKET_READ;
            release_op(endpoint, index);
        }
    }
}

static void forget(struct cq *cq, struct endpoint *endpoint) {
    if (!cq)
        return;
    for (size_t i = 0; i < cq->endpoint_count; i++)
        if (cq->endpoints[i] == endpoint) {
            cq->endpoints[i] = cq->endpoints[--cq->endpoint_count];
            break;
        }
    /* efa_cq.c, efa_cq_poll_ibv_cq passes over completions of a queue pair that is gone. */
    for (size_t i = 0; i < cq->count; i++) {
        struct entry *entry = &cq->entries[(cq->head + i) % cq->size];
        if (entry->endpoint == endpoint)
            entry->endpoint = NULL;
    }
}

static int close_endpoint(struct fid *fid) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    struct domain *domain = endpoint->domain;
    lock(domain);
    detach(endpoint);
    forget(endpoint->tx_cq, endpoint);
    forget(endpoint->rx_cq, endpoint);
    if (endpoint->is_enabled)
        close_qp(endpoint);
    settle_late(endpoint, -1);
    unlock(domain);
    free(endpoint->late);
    free(endpoint->ops);
    free(endpoint->inline_bytes);
    free(endpoint->free);
    free(endpoint->staged);
    free(endpoint->posted);
    free(endpoint->by_address);
    free(endpoint);
    return 0;
}

static int no_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context) {
    (void)fid, (void)name, (void)flags, (void)ops, (void)context;
    return -FI_ENOSYS;
}

static struct fi_ops endpoint_ops = {
    .size = sizeof endpoint_ops, .close = close_endpoint, .bind = bind, .control = control, .ops_open = no_ops_open};
static struct fi_ops_ep endpoint_calls = {
    .size = sizeof endpoint_calls, .cancel = cancel, .getopt = get_option, .setopt = set_option};
static struct fi_ops_cm name_calls = {.size = sizeof name_calls, .getname = get_name};

int open_endpoint(struct fid_domain *fid, struct fi_info *info, struct fid_ep **out, void *context) {
    struct domain *domain = (struct domain *)fid;
    if (!info->ep_attr || info->ep_attr->type != FI_EP_RDM || !info->tx_attr || !info->rx_attr)
        return -FI_EINVAL;
    if (info->tx_attr->size > config.depth || info->rx_attr->size > config.receives)
        return -FI_EINVAL;
    struct endpoint *endpoint = calloc(1, sizeof *endpoint);
    endpoint->fid.fid = (struct fid){.fclass = FI_CLASS_EP, .context = context, .ops = &endpoint_ops};
    endpoint->fid.ops = &endpoint_calls;
    endpoint->fid.cm = &name_calls;
    endpoint->fid.msg = &message_calls;
    endpoint->fid.rma = &rma_calls;
    endpoint->domain = domain;
    endpoint->is_direct = domain->fabric->is_direct;
    endpoint->caps = info->caps;
    endpoint->tx_flags = info->tx_attr->op_flags & ~(FI_INJECT | FI_MORE);
    endpoint->takes_cq_data = info->mode & RX_CQ_DATA;
    endpoint->is_unsolicited = config.unsolicited && !(endpoint->is_direct && endpoint->takes_cq_data);
    endpoint->is_emulated = !endpoint->is_direct && !uses_device_rdma(api(endpoint));
    /* efa_shm.c, efa_shm_info_create; rdm/efa_rdm_ep_fiops.c, shm_permitted. */
    endpoint->has_shm = !endpoint->is_direct && config.shm_transfer && (info->caps & FI_LOCAL_COMM);
    endpoint->uses_shm = endpoint->has_shm;
    endpoint->rnr_retry = 7; /* without end: domain_attr.resource_mgmt is FI_RM_ENABLED, efa_prov_info.c */
    endpoint->depth = info->tx_attr->size ? (uint32_t)info->tx_attr->size : config.depth;
    endpoint->receives = info->rx_attr->size ? (uint32_t)info->rx_attr->size : config.receives;
    endpoint->inject = endpoint->is_direct ? 32 : 1024;
    *out = &endpoint->fid;
    return 0;
}
