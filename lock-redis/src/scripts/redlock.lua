-- What a node of several independent servers does differently; docs/redlock.md says why.
-- KEYS: 5 since when this node has its data.
-- ARGV: the last five: how many nodes the client knows, the run id of the process that it is connected to, its proposal for the
-- token and its place in the queue (us of the servers' clocks, 0 for none), and the longest ttl that clients may ask for (ms).
local BORN = KEYS[5]
-- A proposal that is older (us) may be below tokens that this node has forgotten: its data may be an older copy.
local FRESH = 500000
local NODES, PROCESS = ARGV[#ARGV - 4], ARGV[#ARGV - 3]
local PROPOSAL, MAX_TTL = tonumber(ARGV[#ARGV - 2]), ARGV[#ARGV]
PLACE = tonumber(ARGV[#ARGV - 1])

local function set_born(state, since, nodes, max_ttl)
    redis.call('SET', BORN, table.concat({ state, since, PROCESS, nodes, max_ttl }, ' '))
end

-- Since when the node has its data: 'new', or 'open' if it may grant at once; for how many ms; the stamp; and how many nodes and
-- which longest ttl the clients have. A node that has lost its data begins anew, and so does one that was restarted: what it has
-- loaded may be an older copy.
local function born()
    local state, since, process, nodes, max_ttl =
        string.match(redis.call('GET', BORN) or '', '^(%l+) (%d+) (%S+) (%d+) (%d+)$')
    if process ~= PROCESS or tonumber(since) > now_us then
        state, since, nodes, max_ttl = 'new', stamp, nodes or NODES, max_ttl or MAX_TTL
        set_born(state, since, nodes, max_ttl)
    end
    return state, (now_us - tonumber(since)) / 1000, since, nodes, max_ttl
end

-- What is wrong if clients disagree: their majorities may have no node in common, or a node may grant too early.
local function disagreement(nodes, max_ttl)
    if nodes ~= NODES or max_ttl ~= MAX_TTL then
        return { 'differs', stamp, nodes, max_ttl }
    end
end

-- A new node refuses because leases that it has lost may be valid.
refusal = function()
    local state, age, _, nodes, max_ttl = born()
    local left = tonumber(max_ttl) - age
    return disagreement(nodes, max_ttl) or state == 'new' and left > 0 and { 'young', stamp, math.ceil(left) } or nil
end

-- Sets the counter, which is needed until the clock has passed it for good.
local function count(token)
    redis.call('SET', FENCE, token, 'PX', math.max(0, math.ceil((tonumber(token) - now_us) / 1000)) + RETENTION)
end

-- Draws a token: higher than the last one, and the proposal if that is possible, so that nodes agree. One at a time:
-- the nodes would have to agree on a block as well.
local function draw()
    local last = redis.call('GET', FENCE)
    if last and not string.match(last, '^%d+$') then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local behind = now_us - PROPOSAL
    local usable = behind >= 0 and behind < FRESH
    if usable and not last then
        -- A counter that has expired was below the proposal. One that was lost may have been above it, but not above the clock.
        local _, age = born()
        usable = age >= tonumber(RETENTION)
    end
    local token = math.max(tonumber(last or 0) + 1, usable and PROPOSAL or now_us)
    if token > TOP_TOKEN then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local drawn = text(token)
    count(drawn)
    return drawn, 1
end
