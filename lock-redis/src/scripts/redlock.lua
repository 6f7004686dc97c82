-- What a node of several independent servers does differently; docs/redlock.md says why.
-- KEYS: 5 since when this node has its data.
-- ARGV: the last three: how many nodes the client knows, the run id of the process that it is connected to, and the longest ttl that
-- clients may ask for (ms).
local BORN = KEYS[5]
local NODES, PROCESS, MAX_TTL = ARGV[#ARGV - 2], ARGV[#ARGV - 1], ARGV[#ARGV]

local function set_born(state, since, nodes, max_ttl)
    redis.call('SET', BORN, table.concat({ state, since, PROCESS, nodes, max_ttl }, ' '))
end

-- Since when the node has its data: 'new', or 'open' if it may grant at once; for how many ms; and the stamp. A node that has lost its
-- data begins anew, and so does one that was restarted: what it has loaded may be an older copy. The fourth result is an answer if the
-- client disagrees with those before it: their majorities may have no node in common, or a node may grant too early.
local function born()
    local state, since, process, nodes, max_ttl =
        string.match(redis.call('GET', BORN) or '', '^(%l+) (%d+) (%S+) (%d+) (%d+)$')
    if process ~= PROCESS or tonumber(since) > now_us then
        state, since, nodes, max_ttl = 'new', stamp, nodes or NODES, max_ttl or MAX_TTL
        set_born(state, since, nodes, max_ttl)
    end
    local differs = (nodes ~= NODES or max_ttl ~= MAX_TTL) and { 'differs', stamp, nodes, max_ttl }
    return state, (now_us - tonumber(since)) / 1000, since, differs
end

-- Sets the counter, which is needed until the clock has passed it for good.
local function count(token)
    redis.call('SET', FENCE, token, 'PX', math.max(0, math.ceil((tonumber(token) - now_us) / 1000)) + RETENTION)
end
