-- What a node of several independent servers does. Claims that wait poll, so there is no queue.
-- KEYS: 3 here: of exclusive claims that wait, until when shared ones are not granted before them (ms); 7 since when this node has its data.
-- ARGV: 4 what to do; the last three: how many nodes the client knows, the run id of the process that it is connected to, and the longest ttl that
-- clients may ask for (ms).
local BORN = KEYS[7]
local NODES, PROCESS, MAX_TTL = ARGV[#ARGV - 2], ARGV[#ARGV - 1], ARGV[#ARGV]
-- include shares.lua

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

-- The hold of the owner.
local function own()
    local value = redis.call('GET', LOCK)
    if owner_of(value) == OWNER then
        return value
    end
    local left, record = shared_by(OWNER)
    return left > 0 and record or nil
end

if ARGV[4] == 'release' then
    -- ARGV: 5 the client, 6 the number of its last attempt before this request, 7 '1' if the claim goes on waiting.
    local value = own()
    -- What a later attempt of the same claim was granted stays, however late this request arrives.
    local client, attempt = string.match(value or '', '^%S+ %S+ %d+ %d+ ([^ #]+)#(%d+) ')
    local released = value and not (client == ARGV[5] and tonumber(attempt) > tonumber(ARGV[6]))
    if released and mode_of(value) == 'x' then
        redis.call('DEL', LOCK)
    elseif released then
        unshare(OWNER)
    end
    if ARGV[7] ~= '1' then
        redis.call('ZREM', ORDER, OWNER)
    end
    return { released and 'released' or 'lost', stamp }
end
if ARGV[4] == 'confirm' then
    -- ARGV: 5 the token that the node has granted, 6 the token that the majority shall have, 7 '1' if it has it.
    -- A node that granted the claim anew since then has perhaps lost what it had granted before, so it does not count.
    local value = own()
    local stored = value and token_of(value)
    if not stored or stored ~= ARGV[5] and stored ~= ARGV[6] then
        return { 'lost', stamp }
    end
    local last, token = tonumber(redis.call('GET', FENCE) or '0'), tonumber(ARGV[6])
    if stored ~= ARGV[6] and last >= token and ARGV[7] ~= '1' then
        -- Another shared claim may have drawn this token here, and be given it by a majority with this node.
        return { 'passed', stamp, text(last) }
    end
    if last < token then
        count(ARGV[6])
    end
    if stored ~= ARGV[6] then
        local raised = string.gsub(value, '^(%S+ %S+ )%d+', '%1' .. ARGV[6])
        if mode_of(value) == 'x' then
            redis.call('SET', LOCK, raised, 'KEEPTTL')
        else
            redis.call('HSET', RECORDS, OWNER, raised)
        end
    end
    return { 'confirmed', stamp }
end
local state, age, since, differs = born()
if differs then
    return differs
end
if ARGV[4] == 'born' then
    -- ARGV: 5 a stamp: if the node has its data since then, it may grant at once.
    if state == 'new' and since == ARGV[5] then
        state = 'open'
        set_born(state, since, NODES, MAX_TTL)
    end
    return { state, stamp, math.floor(age), since }
end
-- To acquire. ARGV: 5 ttl in ms, 6 server time in ms when the claim must have ended, 7 the client, 8 the number of its attempt, 9 what to keep
-- of the holder, 10 the proposed token: us of the servers' clocks, or 0, 11 the mode: 'x' (exclusive) or 's' (shared), 12 the token with which the
-- claim holds the name, or 0, 13 for how many ms the claim keeps shared ones out that come after it, should shared ones have this node.
local MODE, KNOWN, ANNOUNCED = ARGV[11], ARGV[12], tonumber(ARGV[13])
-- A proposal that is older (us) may be below tokens that this node has forgotten: its data may be an older copy.
local FRESH = 500000
-- How many entries that are over one request removes.
local BUDGET = 128
if state == 'new' and age < tonumber(MAX_TTL) then
    -- Leases that the node has lost may be valid.
    return { 'young', stamp, math.ceil(MAX_TTL - age) }
end
local life = life_of(ARGV[5], ARGV[6])
if not life then
    return { 'late', stamp }
end

-- Draws a token: higher than the last one, and the proposal if that is possible, so that nodes agree.
local function draw_proposed()
    local last = redis.call('GET', FENCE)
    if last and not string.match(last, '^%d+$') then
        error('fencelock: foreign value in ' .. FENCE)
    end
    local proposal = tonumber(ARGV[10])
    local behind = now_us - proposal
    -- A counter that has expired was below the proposal. One that was lost may have been above it, but not above the clock.
    local usable = behind >= 0 and behind < FRESH and (last or age >= tonumber(RETENTION))
    local token = math.max(tonumber(last or 0) + 1, usable and proposal or now_us)
    if token > TOP_TOKEN then
        error('fencelock: foreign value in ' .. FENCE)
    end
    token = text(token)
    count(token)
    return token
end

-- The claim waits for shared ones: keeps others of them out.
local function announce(length)
    for _, over in ipairs(redis.call('ZRANGE', ORDER, '-inf', now, 'BYSCORE', 'LIMIT', 0, BUDGET)) do
        redis.call('ZREM', ORDER, over)
    end
    -- A full server refuses it, which changes nothing else.
    redis.pcall('ZADD', ORDER, text(now + length), OWNER)
    if redis.call('PTTL', ORDER) < length then
        redis.call('PEXPIRE', ORDER, length)
    end
end

local client = ARGV[7] .. '#'
local value = held()
local shared = redis.call('EXISTS', HOLDERS) == 1
local mine, left = nil, nil
if owner_of(value) == OWNER then
    mine, left = value, redis.call('PTTL', LOCK)
elseif MODE == 's' then
    -- Reads both keys also if there is nothing, so that nothing is written if one is of another type.
    left, mine = shared_by(OWNER)
    mine = left > 0 and mine
end
if mine then
    left = math.max(left, life)
    -- The first write needs no memory, so that a full server does not refuse those behind it.
    redis.call('ZREM', ORDER, OWNER)
    local before, token, acquired, asker, attempt, info = string.match(mine, '^(%S+ %S+ )(%d+)( %d+ )([^ #]+#)(%d+)( .*)$')
    -- A request that the network held back does not undo a later one.
    if before and (asker ~= client or tonumber(attempt) < tonumber(ARGV[8])) then
        if MODE == 's' and token ~= KNOWN then
            -- Left by an earlier attempt: other shared claims may have been given higher tokens since.
            token = draw_proposed()
        end
        mine = table.concat({ before, token, acquired, client, ARGV[8], info })
    end
    if MODE == 'x' then
        redis.call('SET', LOCK, mine, 'PX', left)
    else
        if owner_of(value) == OWNER then
            redis.call('DEL', LOCK)
        end
        share(OWNER, mine, left, MODE)
    end
    return { 'granted', stamp, token_of(mine), life }
end
if value then
    return { 'busy', stamp, redis.call('PTTL', LOCK), value }
end
if shared then
    unshare_over(BUDGET)
end
if MODE == 'x' then
    local record, lease = last_of(1)
    if record then
        if ANNOUNCED > 0 then
            announce(math.min(ANNOUNCED, life))
        end
        return { 'busy', stamp, lease, record }
    end
else
    -- An exclusive claim that waits.
    local last = redis.call('ZRANGE', ORDER, -1, -1, 'WITHSCORES')[2]
    if last and tonumber(last) > now then
        return { 'busy', stamp, tonumber(last) - now, '' }
    end
end
local token = draw_proposed()
if MODE == 'x' then
    hold(OWNER, token, life, client .. ARGV[8], ARGV[9])
else
    share(OWNER, table.concat({ FORMAT, OWNER, token, stamp, client .. ARGV[8], ARGV[9] }, ' '), life, MODE)
end
return { 'granted', stamp, token, life }
